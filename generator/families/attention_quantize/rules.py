"""Which operations and schedules are legal, beside fields that are in their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.families.attention_quantize.schedule import (
    TILE,
    VALUES,
    AttentionQuantizeOperation,
    AttentionQuantizeSchedule,
)

MOST_VECTORS = 8  # rows of which a thread holds 16 values at a time: 64 registers
USUAL_VECTORS = 4


def operation_reasons(operation: AttentionQuantizeOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    reasons = [rules.multiple_of("dim", operation.dim, 32 if operation.quantizes else VALUES)]
    if operation.quantizes and operation.scores == "none":
        reasons.append(f"scores none of element {operation.element}: must be int8 or e4m3")
    if not operation.quantizes and operation.scores != "none":
        reasons.append(f"scores {operation.scores} of element e4m3: must be none, as v is alone")
    if operation.quantizes and operation.lengths == "packed":
        reasons.append(f"lengths packed of element {operation.element}: only e4m3 v has them")
    if operation.smooth and operation.scores == "none":
        reasons.append("smooth with scores none: must be left out, as there is no k")
    return rules.broken(reasons)


def schedule_reasons(
    arch: Architecture, operation: AttentionQuantizeOperation, schedule: AttentionQuantizeSchedule
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    least, most = TILE * operation.lanes // MOST_VECTORS, TILE * operation.lanes
    if least <= schedule.threads <= most:
        return []
    return [f"threads {schedule.threads} of dim {operation.dim}: must be {least} to {most}"]


def complete(
    arch: str, operation: AttentionQuantizeOperation, fields: Mapping[str, Any]
) -> AttentionQuantizeSchedule:
    """`threads: auto`: so many that each has four rows of a tile."""
    given = {name: value for name, value in fields.items() if value != "auto"}
    threads: Any = max(64, TILE * operation.lanes // USUAL_VECTORS)
    return AttentionQuantizeSchedule(**{"threads": threads, **given})
