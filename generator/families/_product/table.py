"""What the tables of all products know of choosing a kernel: how D is stored, waves of tiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Generic, cast

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator.elements import element
from warploom.generator.epilogue import gate_of
from warploom.generator.families._product.launch import MOST_BLOCKS, Extents, cut, tiles
from warploom.generator.families._product.schedule import ProductOperation, ProductSchedule, Store
from warploom.generator.families.table import Demand, Row, ShapeT, Table
from warploom.generator.launches import DeviceLimits
from warploom.generator.tensor_maps import PITCH_BYTES

OperationT = TypeVar("OperationT", bound=ProductOperation, default=Any)
ScheduleT = TypeVar("ScheduleT", bound=ProductSchedule, default=Any)

SHORTEST_PART = 8  # k tiles of a part of k: of fewer, a second launch saves nothing


class ProductTable(Table[OperationT, ScheduleT, ShapeT], Generic[OperationT, ScheduleT, ShapeT]):
    """What the tensors of a product require of a schedule is a `Store`."""

    unsuited = (
        "none of them can be stored directly, which this n takes: its rows do not end at a "
        "multiple of 16 bytes",
        "add schedules with store: direct",
    )

    def variants(self, fields: dict[str, Any], requires: object) -> Iterable[dict[str, Any]]:
        """Stored by TMA where tensors allow it; directly where they do not, or it is not legal."""
        ways = ("direct",) if requires == "direct" else ("tma", "direct")
        return ({**fields, "store": store} for store in ways)

    def order(
        self, row: Row, schedule: ScheduleT, shape: ShapeT, device: DeviceLimits, requires: object
    ) -> tuple[float, ...]:
        """Schedules that must store D directly come after those that need not.

        Those that are `last` come last: no other of their class has registers for an operation.
        """
        busiest = waves(schedule, cast("Extents", shape), device)
        rank = 2 if row.get("last") else schedule.store != (requires or "tma")
        return rank, busiest * row["cost"]

    def reason(self, operation: OperationT, shape: ShapeT, order: tuple[float, ...]) -> str:
        """Why the table has the schedule that came first."""
        return f"default table: least waves * cost ({order[1]:.2f}) of its class"

    def required(self, operation: OperationT, shape: ShapeT) -> Store:
        """How a dense D can be stored: by TMA where its rows end at multiples of 16 bytes."""
        n = cast("Extents", shape).n // (2 if gate_of(operation.epilogue) else 1)
        return "direct" if n * element(operation.d).bytes % PITCH_BYTES else "tma"

    def fitted(self, schedule: ScheduleT, requires: object) -> ScheduleT:
        """The schedule with direct stores, where D takes those."""
        if requires != "direct":
            return schedule
        return replace(schedule, store="direct")  # type: ignore[call-arg] # a field of families'

    def suits(self, schedule: ScheduleT, shape: ShapeT) -> bool:
        """Parts of k are for blocks that tiles leave idle, and each is worth a second launch."""
        parts, sizes = schedule.split_k, cast("Extents", shape)
        if parts == 1:
            return True
        if min(*schedule.tile, *schedule.cluster) < 1:  # of a record, which may not be legal
            return False
        blocks = tiles(schedule, sizes) * schedule.multicast * parts
        return blocks <= MOST_BLOCKS and sizes.k >= SHORTEST_PART * schedule.tile[2] * parts

    def lacks(self, schedule: ScheduleT, requires: object) -> Demand | None:
        """A schedule that stores by TMA lacks direct stores."""
        if not (schedule.store == "tma" and requires == "direct"):
            return None
        return (
            "stores by TMA: D's address, rows and pitch are multiples of 16 bytes, and "
            "epilogue operands start at pairs",
            "use a spec with store: direct, or leave spec out",
        )


def waves(schedule: ProductSchedule, shape: Extents, device: DeviceLimits) -> float:
    """How many tiles the busiest multiprocessor gets; of tiles that are cut, not whole ones."""
    found = cut(schedule, shape, device)
    return found.waves + found.lost / max(1, found.k_tiles)
