"""Which operations and schedules are legal, beside fields that are in their ranges."""

from __future__ import annotations

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.families.attention_append.schedule import (
    VALUES,
    AttentionAppendOperation,
    AttentionAppendSchedule,
)


def operation_reasons(operation: AttentionAppendOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    found = [rules.multiple_of("dim", operation.dim, 2 * VALUES)]
    if operation.cache == "same" and operation.scales != "none":
        found.append(f"scales {operation.scales} of cache same: must be none, or cache of 8 bits")
    if operation.cache == "int8" and operation.scales == "none":
        found.append("scales none of cache int8: must be head or token, as int8 is whole numbers")
    if operation.rotary == "none" and operation.queries:
        found.append("queries without rotary: must be with rotary, for q is not cached")
    if operation.rotary == "none" and operation.table != "fp32":
        found.append("table same without rotary: must be fp32, its default, for there is none")
    return rules.broken(found)


def schedule_reasons(
    arch: Architecture, operation: AttentionAppendOperation, schedule: AttentionAppendSchedule
) -> list[str]:
    """Why the schedule does not fit the operation: every one does."""
    return []
