"""The backward's rules: which operations and schedules are legal."""

from __future__ import annotations

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.families._attention.modifiers import MODIFIERS
from warploom.generator.families.attention_backward.layout import (
    SPILLED,
    WIDEST,
    attention_backward_layout,
)
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.wgmma import WGMMA_M

MASK_BITS = 32  # rows of q in a word of a mask
CAPS = " or ".join(kind.name for kind in MODIFIERS if kind.caps)


def schedule_reasons(
    arch: Architecture, operation: AttentionBackwardOperation, schedule: AttentionBackwardSchedule
) -> list[str]:
    """Why the schedule does not fit the operation on `arch`; empty when it does."""
    tile = rules.multiple_of("q_tile", schedule.q_tile, 16)
    tile = tile or rules.wgmma_n("q_tile", schedule.q_tile, integer=False)
    if tile:
        return [tile]
    layout = attention_backward_layout(arch, operation, schedule)
    warpgroups, box = schedule.warpgroups, WGMMA_M if layout.swap else layout.box_columns
    rows = layout.columns if layout.swap else schedule.q_tile
    return rules.broken(
        [
            None
            if rows % WGMMA_M == 0 and warpgroups == layout.blocks * layout.splits
            else f"q_tile {schedule.q_tile} with kv_tile {schedule.kv_tile}: "
            f"{warpgroups} warpgroups cannot share dq",
            None
            if layout.splits == 1 or layout.query_n % (8 if layout.swap else box) == 0
            else f"q_tile {schedule.q_tile} with kv_tile {schedule.kv_tile}: a warpgroup's "
            f"{layout.query_n} columns of dq end within a box of {box}",
            None
            if operation.bias != "none" or not operation.bias_gradient
            else "bias_gradient without a bias: takes a bias",
            *(one for modifier in operation.modifiers for one in modifier.backward_reasons()),
            None
            if schedule.accumulate == "bulk" or not operation.deterministic
            else "accumulate direct: a deterministic kernel takes bulk",
            *(_listed(schedule, layout.q_rows) if operation.blocks else ()),
            *(_shared_rows(operation, schedule) if schedule.cluster_split == "rows" else ()),
            None
            if schedule.v_in_registers == "none"
            or not (schedule.overlap or operation.caps or operation.dim > WIDEST or operation.dim_v)
            else f"v_in_registers {schedule.v_in_registers}: only without overlap and {CAPS}, "
            f"and of heads of up to {WIDEST}, do registers suffice for v; take none",
            None
            if schedule.v_in_registers == "none" or operation.bias != "fp32"
            else f"v_in_registers {schedule.v_in_registers} with a bias of fp32: it takes the "
            "registers; take none",
            None
            if schedule.stages > 1 or not schedule.single_do
            else "stages 1 with single_do: q has one stage as well; take false, or 2 stages",
            None
            if schedule.stages > 1 or not schedule.overlap
            else "stages 1 with overlap: the next q arrives before this one is let go; take 2 "
            "stages, or no overlap",
            None
            if schedule.cluster == 1 or not operation.dim_v
            else f"cluster {schedule.cluster} with dim_v {operation.dim_v}: no kernel sums such "
            "gradients of several blocks; take 1",
            None
            if layout.span >= 32
            else f"q_tile {schedule.q_tile} with kv_tile {schedule.kv_tile}: a warpgroup's "
            f"{layout.query_n} columns of dq are no multiple of 16",
            None
            if schedule.overlap
            or (operation.dim, schedule.q_tile, operation.caps, schedule.accumulate) not in SPILLED
            else f"q_tile {schedule.q_tile} with dim {operation.dim}"
            f"{f', {CAPS}' if operation.caps else ''} and no overlap: it spills registers; take "
            "another q_tile",
            None
            if not operation.dropout or layout.q_rows % 16 == 0
            else f"cluster_split rows with q_tile {schedule.q_tile} and dropout: a warpgroup has "
            "words of 16 rows; take a multiple of 32",
            rules.fits_registers(layout.registers, layout.register_budget),
            rules.fits_shared(layout.shared_bytes, arch),
        ]
    )


def _listed(schedule: AttentionBackwardSchedule, q_rows: int) -> list[str | None]:
    """What lists of tiles ask for."""
    return [
        rules.multiple_of("q_tile with blocks", q_rows, MASK_BITS),
        None
        if schedule.cluster == 1
        else f"cluster {schedule.cluster} with blocks: lists of heads are walked one after the "
        "other; take 1",
    ]


def _shared_rows(
    operation: AttentionBackwardOperation, schedule: AttentionBackwardSchedule
) -> list[str | None]:
    """What two blocks ask for that share the rows of a kv tile."""
    return [
        None
        if operation.dim > WIDEST
        else "cluster_split rows: a block has room for all gradients of a head of "
        f"{operation.dim}; take columns",
        None
        if schedule.kv_tile == 2 * WGMMA_M
        else f"cluster_split rows with kv_tile {schedule.kv_tile}: two blocks have 64 rows each; "
        "take 128",
        None
        if schedule.cluster == 1
        else f"cluster_split rows with cluster {schedule.cluster}: the two blocks are a cluster "
        "already; take cluster 1",
    ]
