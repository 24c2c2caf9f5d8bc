"""GEMM's shared memory and registers, derived from operation and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from warploom.generator.elements import element
from warploom.generator.families._product.layout import ProductLayout, budget, chunk, store_box
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

    @property
    def stage_bytes(self) -> int:
        """Operand bytes of one stage: what its full barrier expects."""
        return self.a.bytes + self.b.bytes


@lru_cache(maxsize=1024)  # each is asked for a few times in a row
def gemm_layout(operation: GemmOperation, schedule: GemmSchedule) -> GemmLayout:
    """Lay out a schedule, legal or not."""
    m, n, k = schedule.tile
    cluster_m, cluster_n = schedule.cluster
    chunk_columns, registers = chunk(
        operation, schedule, _accumulators(operation, schedule), budget(schedule)
    )
    box = store_box(schedule, chunk_columns)
    # Sums of int32 at the limit spill, which those of fp32 do not.
    left = budget(schedule) - registers - element(operation.a).is_integer
    return GemmLayout(
        a=operand_tile(
            element(operation.a),
            k_major=operation.layout_a == "row",
            extent=m,
            tile_k=k,
            blocks=cluster_n,
        ),
        b=operand_tile(
            element(operation.b),
            k_major=operation.layout_b == "col",
            extent=n,
            tile_k=k,
            blocks=cluster_m,
        ),
        chunk_columns=chunk_columns,
        store_box=box,
        store_span=box[0] * element(operation.d).bits // 8,
        stages=schedule.stages,
        consumers=schedule.consumers,
        sums_bytes=4 * m * n,
        registers=registers,
        register_budget=budget(schedule),
        parts_in_flight=16 if left >= 16 * 4 else 8,
        reduced=schedule.split_k > 1,
    )


def _accumulators(operation: GemmOperation, schedule: GemmSchedule) -> int:
    """Registers of a thread that have sums."""
    one = schedule.rows * schedule.columns // (WARPGROUP * schedule.sharing)
    return (2 if operation.accumulation == "promoted" else 1) * one
