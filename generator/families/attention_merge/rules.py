"""Which operations and schedules are legal, beside fields that are in their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.families.attention_merge.schedule import (
    VALUES,
    AttentionMergeOperation,
    AttentionMergeSchedule,
)

MOST_VECTORS = 4  # of a thread: it holds those of two rows, 64 registers
LANES = 32  # of a warp


def operation_reasons(operation: AttentionMergeOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    return rules.broken([rules.multiple_of("dim", operation.dim, VALUES)])


def schedule_reasons(
    arch: Architecture, operation: AttentionMergeOperation, schedule: AttentionMergeSchedule
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    if vectors(operation, schedule) <= MOST_VECTORS:
        return []
    least = -(-operation.dim // VALUES // MOST_VECTORS)
    return [f"lanes {schedule.lanes} of dim {operation.dim}: must be at least {least}"]


def vectors(operation: AttentionMergeOperation, schedule: AttentionMergeSchedule) -> int:
    """How many vectors of a row a thread has, at most."""
    return -(-operation.dim // (VALUES * schedule.lanes))


def complete(
    arch: str, operation: AttentionMergeOperation, fields: Mapping[str, Any]
) -> AttentionMergeSchedule:
    """`lanes: auto`: as many as a row has vectors, rounded up; at most a warp."""
    given = {name: value for name, value in fields.items() if value != "auto"}
    lanes = min(LANES, 1 << (-(-operation.dim // VALUES) - 1).bit_length())
    return AttentionMergeSchedule(**{"lanes": lanes, **given})
