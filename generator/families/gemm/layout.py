"""GEMM's shared memory and registers, derived from operation and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from warploom.generator.elements import ELEMENTS
from warploom.generator.epilogue import gate_of
from warploom.generator.families._product.layout import ProductLayout, budget, chunk, store_box
from warploom.generator.families.gemm.scales import scale_bytes, scale_registers
from warploom.generator.families.gemm.schedule import (
    GemmOperation,
    GemmSchedule,
)
from warploom.generator.tensor_maps import OperandTile, operand_tile
from warploom.generator.wgmma import WARPGROUP


@dataclass(frozen=True, slots=True)
class GemmLayout(ProductLayout):
    """Where everything of one block lies."""

    b: OperandTile
    scale_bytes: int  # of block scales that are on their way

    @property
    def operand_bytes(self) -> int:
        """Block scales, which each warp copies for itself."""
        return self.scale_bytes


@lru_cache(maxsize=1024)  # each is asked for a few times in a row
def gemm_layout(operation: GemmOperation, schedule: GemmSchedule) -> GemmLayout:
    """Lay out a schedule, legal or not."""
    m, n, k = schedule.tile
    cluster_m, cluster_n = schedule.cluster
    kind, most = ELEMENTS[operation.a], budget(schedule)
    accumulators = _accumulators(operation, schedule)
    chunk_columns, registers = chunk(operation, schedule, accumulators, most)
    box = store_box(operation, schedule, chunk_columns)
    # Sums of int32 at the limit spill, which those of fp32 do not.
    left = most - registers - kind.is_integer
    a_major, b_major = operation.layout_a == "row", operation.layout_b == "col"
    a = operand_tile(kind, k_major=a_major, extent=m, tile_k=k, blocks=cluster_n)
    b = operand_tile(
        ELEMENTS[operation.b],
        k_major=b_major,
        extent=n,
        tile_k=k,
        blocks=cluster_m,
        gated=gate_of(operation.epilogue) is not None,
    )
    return GemmLayout(
        a=a,
        b=b,
        stage_bytes=a.bytes + b.bytes,
        chunk_columns=chunk_columns,
        store_box=box,
        store_span=box[0] * ELEMENTS[operation.d].bits // 8,
        stages=schedule.stages,
        consumers=schedule.consumers,
        sums_bytes=4 * m * n,
        registers=registers,
        register_budget=most,
        parts_in_flight=16 if left >= 16 * 4 else 8,
        reduced=schedule.split_k > 1,
        scale_bytes=scale_bytes(operation, schedule),
    )


def _accumulators(operation: GemmOperation, schedule: GemmSchedule) -> int:
    """Registers of a thread that have sums, and the block scales that they are multiplied by."""
    one = schedule.rows * schedule.columns // (WARPGROUP * schedule.sharing)
    sums = (2 if operation.accumulation == "promoted" else 1) * one
    if operation.block_scales == "none":
        return sums
    return sums + scale_registers(operation, schedule)
