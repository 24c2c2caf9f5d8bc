"""Which schedule a call gets that nothing was tuned for."""

from __future__ import annotations

from warploom.generator.families.route.schedule import RouteOperation, RouteSchedule
from warploom.generator.families.route.shape import RouteShape
from warploom.generator.families.table import Table


class RouteTable(Table[RouteOperation, RouteSchedule, RouteShape]):
    """The first schedule of a call's class is its own."""

    def features(self, operation: RouteOperation, shape: RouteShape) -> dict[str, int | str]:
        """The fields of operation and shape, and the pairs of a token and an expert."""
        return {**super().features(operation, shape), "pairs": shape.tokens * shape.k}
