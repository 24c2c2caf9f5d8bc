"""Which decode operations and schedules are legal, and what `auto` stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.families.attention_decode.layout import decode_layout, room
from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.families.attention_decode.schedule import WARP_ROWS, DecodeSchedule
from warploom.generator.knob import knobs


def operation_reasons(operation: DecodeOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    return rules.broken(
        [
            None
            if operation.page == 0 or operation.keys == "fixed"
            else f"page {operation.page} with packed keys: must be 0; a table says where pages are",
            None
            if operation.scales != "token" or operation.cache != "same"
            else f"scales token of a cache of {operation.element}: must be none or head",
        ]
    )


def schedule_reasons(
    arch: Architecture, operation: DecodeOperation, schedule: DecodeSchedule
) -> list[str]:
    """Why the schedule does not fit the operation on `arch`; empty when it does."""
    if schedule.warps % schedule.row_warps:
        return [
            f"warps {schedule.warps} with rows {schedule.rows}: must be a multiple of "
            f"{schedule.row_warps}; a warp has {WARP_ROWS} rows"
        ]
    layout = decode_layout(operation, schedule)
    return rules.broken(
        [
            rules.multiple_of("keys", schedule.keys, 16 * schedule.key_warps),
            rules.fits_registers(layout.registers, layout.register_budget),
            rules.fits_shared(layout.shared_bytes, arch),
            None
            if layout.shared_bytes <= room(schedule)
            else f"shared memory {layout.shared_bytes} bytes, ctas_per_sm {schedule.ctas_per_sm}: "
            f"must be at most {room(schedule)}; use fewer stages or a smaller tile",
        ]
    )


def complete(arch: str, operation: DecodeOperation, fields: Mapping[str, Any]) -> DecodeSchedule:
    """Make a schedule of `fields`; `stages: auto` becomes as many as fill shared memory."""
    if fields.get("stages", "auto") != "auto":
        return DecodeSchedule(**fields)
    schedule = DecodeSchedule(**{**fields, "stages": 2})
    if schedule.warps < schedule.row_warps:
        return schedule  # which is not legal
    layout = decode_layout(operation, schedule)
    stages = (room(schedule) - layout.fixed_bytes) // layout.ring_bytes
    return replace(schedule, stages=knobs(DecodeSchedule)["stages"].nearest(stages))
