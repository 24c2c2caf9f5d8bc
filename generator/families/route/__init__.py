"""The rows of each expert: where tokens go, from the ids of the experts that they chose."""

from __future__ import annotations

from typing import Any

from warploom.generator.families.base import Family
from warploom.generator.families.route.schedule import (
    PAIRS,
    RouteLayout,
    RouteOperation,
    RouteProblem,
    RouteSchedule,
    RouteShape,
    RouteSpec,
)

__all__ = ["FAMILY", "RouteOperation", "RouteProblem", "RouteSchedule", "RouteShape"]


class Route(Family[RouteOperation, RouteSchedule, RouteShape, RouteProblem]):
    """Tokens sorted by expert."""

    def layout(self, spec: RouteSpec) -> RouteLayout:
        """The counts of each warp."""
        return RouteLayout(spec.schedule)

    def context(self, spec: RouteSpec) -> dict[str, Any]:
        """The C++ type of ids, and how many a thread loads at once."""
        return {"id": spec.operation.cpp, "pairs": PAIRS}


FAMILY = Route()
