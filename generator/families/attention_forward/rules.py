"""Attention's rules: which operations and schedules are legal."""

from __future__ import annotations

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.families.attention_forward.layout import attention_layout
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
)


def schedule_reasons(
    arch: Architecture, operation: AttentionOperation, schedule: AttentionSchedule
) -> list[str]:
    """Why the schedule does not fit the operation on `arch`; empty when it does."""
    tile = rules.multiple_of("kv_tile", schedule.kv_tile, 16)
    tile = tile or rules.wgmma_n("kv_tile", schedule.kv_tile, integer=False)
    if tile:
        return [tile]
    layout = attention_layout(arch, operation, schedule)
    return rules.broken(
        [
            None
            if schedule.stages >= 2 or not schedule.overlap
            else "stages 1 with overlap: the next k arrives under the products of this v; take 2",
            None
            if schedule.warpgroups > 1 or not schedule.pingpong
            else f"pingpong with q_tile {schedule.q_tile}: takes two warpgroups, 64 rows each",
            *(one for has in operation.modifiers for one in has.forward_reasons(schedule)),
            rules.fits_registers(layout.registers, layout.register_budget),
            rules.fits_shared(layout.shared_bytes, arch),
        ]
    )
