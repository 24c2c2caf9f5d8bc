"""Which schedules are legal, beside fields that are in their ranges; and what `auto` stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warploom.generator.architectures import Architecture
from warploom.generator.families.axpy.schedule import AxpyOperation, AxpySchedule

LOAD_BYTES = 16  # of the widest load that there is


def schedule_reasons(
    arch: Architecture, operation: AxpyOperation, schedule: AxpySchedule
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    if schedule.values * operation.type.bytes <= LOAD_BYTES:
        return []
    return [f"values {schedule.values} of {operation.element}: a load has {LOAD_BYTES} bytes"]


def complete(arch: str, operation: AxpyOperation, fields: Mapping[str, Any]) -> AxpySchedule:
    """Make a schedule of `fields`; `values: auto` becomes as many as one load can bring."""
    given = {name: value for name, value in fields.items() if value != "auto"}
    return AxpySchedule(**{"values": LOAD_BYTES // operation.type.bytes, **given})
