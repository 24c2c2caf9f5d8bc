"""How long a call takes: waves of tiles, by the traffic of shared memory, or memory's."""

from __future__ import annotations

from warploom.generator.families.sparse_gemm.schedule import (
    TILE_K,
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
    "tile": 1e-6,  # seconds to store a tile
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
    written = schedule.rows * TILE_K + schedule.tokens * 2 * TILE_K
    read = schedule.rows * TILE_K + blocks * schedule.tokens * 2 * TILE_K
    products = blocks * schedule.tokens * TILE_K / 64  # cycles of the tensor cores
    stage = max(products, (written + read) / constants["port"]) / constants["clock"]
    tiles = -(-shape.m // schedule.tokens) * -(-shape.n // schedule.rows)
    waves = -(-tiles // multiprocessors)
    each = -(-shape.k // TILE_K) * stage + constants["tile"]
    traffic = 2 * (shape.m * shape.k + shape.m * shape.n) + shape.n * shape.k * 9 / 8
    return constants["launch"] + max(waves * each, traffic / constants["bandwidth"])
