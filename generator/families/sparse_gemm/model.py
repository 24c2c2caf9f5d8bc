"""How long a call takes: waves of tiles, by the traffic of shared memory, or memory's."""

from __future__ import annotations

from warploom.generator.elements import element
from warploom.generator.families.sparse_gemm.schedule import (
    STAGE_BYTES,
    SparseGemmOperation,
    SparseGemmSchedule,
)
from warploom.generator.families.sparse_gemm.shape import SparseGemmShape
from warploom.generator.model.arithmetic import Value

START = {
    "launch": 3e-6,  # seconds
    "bandwidth": 3.5e12,  # bytes a second of memory
    "clock": 1.5e9,  # cycles a second
    "port": 128.0,  # bytes a cycle of shared memory
    "tile": 1e-6,  # seconds to store a tile; a part of k takes three of them
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
    written, read = values + tokens, values + blocks * tokens
    products = blocks * schedule.tokens  # cycles of the tensor cores
    stage = max(products, (written + read) / constants["port"]) / constants["clock"]
    tiles = -(-shape.m // schedule.tokens) * -(-shape.n // schedule.rows)
    stages = -(-shape.k // operation.tile_k)
    parts = min(schedule.split_k, stages)
    waves = -(-tiles * parts // multiprocessors)
    each = -(-stages // parts) * stage + constants["tile"] * (1 if parts == 1 else 3)
    size = element(operation.element).bytes
    weight = shape.n * shape.k * (4 * size + 1) / 8  # values, and 2 bits for each
    traffic = size * shape.m * shape.k + 2 * shape.m * shape.n + weight
    return constants["launch"] + max(waves * each, traffic / constants["bandwidth"])
