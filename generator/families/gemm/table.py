"""Which schedule a product gets that nothing was tuned for, where no model of its GPU decides.

It is the least waves * cost of its class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from warploom.generator.elements import element
from warploom.generator.families._product import Store
from warploom.generator.families._product.cut import cut
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule
from warploom.generator.families.gemm.shape import GemmShape
from warploom.generator.families.table import Demand, Feature, Row, Table
from warploom.generator.launches import DeviceLimits
from warploom.generator.tensor_maps import PITCH_BYTES


class GemmTable(Table[GemmOperation, GemmSchedule, GemmShape]):
    """What tensors require is how D can be stored: by TMA, or `direct` only."""

    kinds = ("bits",)
    advice = "convert the operands, or choose another out_dtype or epilogue"
    unsuited = (
        "none of them can be stored directly, which this n takes: its rows do not end at a "
        "multiple of 16 bytes",
        "add schedules with store: direct",
    )

    def modelled(self, operation: GemmOperation) -> bool:
        """K-major operands without promotion were swept; of others the classes know more."""
        plain = operation.accumulation == "fast"
        return plain and (operation.layout_a, operation.layout_b) == ("row", "col")

    def features(self, operation: GemmOperation, shape: GemmShape) -> dict[str, Feature]:
        """The bits of the operands, their layouts, how sums are kept, rows and depth."""
        return {
            "bits": element(operation.a).bits,
            "layout_a": operation.layout_a,
            "layout_b": operation.layout_b,
            "accumulation": operation.accumulation,
            "m": shape.m,
            "k": shape.k,
        }

    def variants(self, fields: dict[str, Any], requires: object) -> Iterable[dict[str, Any]]:
        """Stored by TMA where tensors allow it; directly where they do not, or it is not legal."""
        ways = ("direct",) if requires == "direct" else ("tma", "direct")
        return ({**fields, "store": store} for store in ways)

    def order(
        self,
        row: Row,
        schedule: GemmSchedule,
        shape: GemmShape,
        device: DeviceLimits,
        requires: object,
    ) -> tuple[float, ...]:
        """Schedules that must store D directly come after those that need not."""
        return schedule.store != (requires or "tma"), waves(schedule, shape, device) * row["cost"]

    def reason(self, operation: GemmOperation, shape: GemmShape, order: tuple[float, ...]) -> str:
        """Why the table has the schedule that came first."""
        return f"least waves * cost ({order[1]:.2f}) of its class in the table"

    def required(self, operation: GemmOperation, shape: GemmShape) -> Store:
        """How a dense D can be stored: by TMA where its rows end at multiples of 16 bytes."""
        return "direct" if shape.n * element(operation.d).bytes % PITCH_BYTES else "tma"

    def fitted(self, schedule: GemmSchedule, requires: object) -> GemmSchedule:
        """The schedule with direct stores, where D takes those."""
        return replace(schedule, store="direct") if requires == "direct" else schedule

    def lacks(self, schedule: GemmSchedule, requires: object) -> Demand | None:
        """A schedule that stores by TMA lacks direct stores."""
        if not (schedule.store == "tma" and requires == "direct"):
            return None
        return (
            "stores by TMA: D's address, rows and pitch are multiples of 16 bytes, and "
            "epilogue operands start at pairs",
            "use a spec with store: direct, or leave spec out",
        )


def waves(schedule: GemmSchedule, shape: GemmShape, device: DeviceLimits) -> float:
    """How many tiles the busiest multiprocessor gets; of tiles that are cut, not whole ones."""
    found = cut(schedule, shape, device)
    return found.waves + found.lost / max(1, found.k_tiles)
