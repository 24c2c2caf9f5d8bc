"""Which schedule a cast gets that nothing was tuned for."""

from __future__ import annotations

from warploom.generator.families.cast.schedule import CastOperation, CastSchedule
from warploom.generator.families.cast.shape import CastShape
from warploom.generator.families.table import Table


class CastTable(Table[CastOperation, CastSchedule, CastShape]):
    """The first schedule of a call's class is its own."""

    def features(self, operation: CastOperation, shape: CastShape) -> dict[str, int | str]:
        """The fields of operation and shape, and which kernel the operation is."""
        return {**super().features(operation, shape), "body": operation.body}
