"""Which operations and schedules are legal, beside fields that are in their ranges."""

from __future__ import annotations

from warploom.generator.architectures import Architecture
from warploom.generator.families.combine.schedule import CombineOperation, CombineSchedule


def operation_reasons(operation: CombineOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    if operation.dot and (operation.direction != "permute" or operation.weights == "none"):
        given = f"direction {operation.direction}, weights {operation.weights}"
        return [f"dot with {given}: must be with direction permute, and with weights"]
    return []


def schedule_reasons(
    arch: Architecture, operation: CombineOperation, schedule: CombineSchedule
) -> list[str]:
    """Why the schedule does not fit the operation: every one does."""
    return []
