"""How long a call takes: waves of tiles, by what bounds a stage of them, or memory's traffic."""

from __future__ import annotations

from warploom.generator.elements import element
from warploom.generator.families.sparse_gemm.schedule import (
    STAGE_BYTES,
    SparseGemmOperation,
    SparseGemmSchedule,
)
from warploom.generator.families.sparse_gemm.shape import SparseGemmShape
from warploom.generator.model.arithmetic import Value, slowest

START = {  # of an H200: off by 21 % (root of the mean square) for 98 kernels at twelve shapes
    "launch": 1e-6,  # seconds
    "bandwidth": 3.2e12,  # bytes a second of memory
    "clock": 1.65e9,  # cycles a second
    "port": 128.0,  # bytes a cycle of an SM's shared memory
    "l2": 64.0,  # bytes a cycle that an SM gets from L2
    "latency": 1.5e-6,  # seconds from asking for a stage to having it
    "tile": 3.5e-6,  # seconds to fill the stages and to store a tile
    "trip": 6e-7,  # seconds to read sums of another part of k
}


def seconds(
    constants: Value,
    operation: SparseGemmOperation,
    schedule: SparseGemmSchedule,
    shape: SparseGemmShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    blocks = schedule.consumers * schedule.blocks
    # Each instruction reads 64 rows of values and all tokens; TMA writes the stage once.
    values, tokens = schedule.rows * STAGE_BYTES // 2, schedule.tokens * STAGE_BYTES
    loaded = values + tokens + schedule.rows * operation.tile_k // 8
    stage = slowest(
        blocks * schedule.tokens / constants["clock"],  # cycles of the tensor cores
        (loaded + values + blocks * tokens) / constants["port"] / constants["clock"],
        loaded / constants["l2"] / constants["clock"],
        constants["latency"] / schedule.stages,
    )
    tiles = -(-shape.m // schedule.tokens) * -(-shape.n // schedule.rows)
    stages = -(-shape.k // operation.tile_k)
    parts = min(schedule.split_k, stages)
    waves = -(-tiles * parts // multiprocessors)
    # The CTA that comes last reads the sums of all parts; of `parts` CTAs one does.
    trips = constants["trip"] * -(-schedule.blocks * schedule.tokens // 64) if parts > 1 else 0.0
    each = -(-stages // parts) * stage + constants["tile"] + trips
    size = element(operation.element).bytes
    weight = shape.n * shape.k * (4 * size + 1) / 8  # values, and 2 bits for each
    traffic = size * shape.m * shape.k + 2 * shape.m * shape.n + weight
    computed = waves * each + (parts - 1) * trips
    return constants["launch"] + max(computed, traffic / constants["bandwidth"])
