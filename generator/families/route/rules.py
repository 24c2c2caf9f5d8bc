"""Which schedules are legal, beside fields that are in their ranges."""

from __future__ import annotations

from warploom.generator.architectures import Architecture
from warploom.generator.families.route.schedule import RouteOperation, RouteSchedule


def schedule_reasons(
    arch: Architecture, operation: RouteOperation, schedule: RouteSchedule
) -> list[str]:
    """Why the schedule does not fit the operation: every one does."""
    return []
