"""Attention's rules: which operations and schedules are legal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.families._attention import UNLIKE_DIMS
from warploom.generator.families.attention_forward.layout import attention_layout
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
)

DIMS_OF_EIGHT = (64, 96, 128, 256)  # of a head, where q and k are of 8 bits
MOST_PROMOTED = 128  # of which products and their sums fit a thread's registers
MOST_KEYS_OF_EIGHT = 192  # of a kv tile
KEYS_OF_A_SCALE = 128  # and of each sequence of v that is dim-major: it begins at a multiple


def usual_sums(weights: str, dim: int) -> Literal["promoted", "fast"]:
    """What adds weights times v up where nobody says it: fp32, where registers suffice."""
    return "promoted" if weights == "same" or dim <= MOST_PROMOTED else "fast"


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
            *(_reasons_of_eight(operation, schedule) if operation.eight else ()),
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


def operation_reasons(operation: AttentionOperation) -> list[str]:
    """Why an operation on operands of 8 bits is not legal; empty when it is."""
    broken = rules.broken([one for has in operation.modifiers for one in has.reasons()])
    if operation.dim_v:
        broken += operation.reasons_of_dims(UNLIKE_DIMS)
    own = (operation.weights, operation.sums, operation.scales)
    if not operation.eight:
        named = {"weights": "same", "sums": "promoted", "scales": "heads"}
        return broken + [
            f"{name} {value} with scores same: is of q and k of 8 bits; take scores e4m3 or int8"
            for (name, default), value in zip(named.items(), own, strict=True)
            if value != default
        ]
    return broken + rules.broken(
        [
            f"dim {operation.dim} with scores {operation.scores}: must be one of "
            f"{', '.join(map(str, DIMS_OF_EIGHT))}"
            if operation.dim not in DIMS_OF_EIGHT
            else None,
            f"sums {operation.sums} with weights same: is of weights of e4m3; leave it out"
            if operation.weights == "same" and operation.sums != "promoted"
            else None,
            f"sums promoted with dim {operation.dim}: takes more registers than there are; take "
            "sums fast, or weights same"
            if operation.promoted and operation.dim > MOST_PROMOTED
            else None,
            f"dim_v {operation.dim_v} with scores {operation.scores}: no kernel has both"
            if operation.dim_v
            else None,
            "scales blocks with lengths packed: no kernel has both; take scales of heads"
            if operation.scales == "blocks" and operation.lengths == "packed"
            else None,
            *(
                f"{modifier.name} with scores {operation.scores}: no kernel has both"
                for modifier in operation.modifiers
                if not modifier.eight
            ),
        ]
    )


def _reasons_of_eight(
    operation: AttentionOperation, schedule: AttentionSchedule
) -> Iterator[rules.Reason]:
    if schedule.overlap:
        yield (
            f"overlap with scores {operation.scores}: kernels of 8 bits have the next scores "
            "under a product, but no softmax; take false"
        )
    if operation.weights != "same":
        yield rules.multiple_of("kv_tile", schedule.kv_tile, 32)
    if operation.promoted and schedule.rescale == "needed":
        yield "rescale needed with sums promoted: adding the product rescales; take always"
    if operation.scores == "int8":
        yield rules.wgmma_n("kv_tile", schedule.kv_tile, integer=True)
    if schedule.kv_tile > MOST_KEYS_OF_EIGHT:
        yield (
            f"kv_tile {schedule.kv_tile} with scores {operation.scores}: takes more registers "
            f"than there are; at most {MOST_KEYS_OF_EIGHT}"
        )
    of_blocks = operation.scales == "blocks"
    begins = operation.lengths == "packed" and operation.weights != "same"
    if (of_blocks or begins) and KEYS_OF_A_SCALE % schedule.kv_tile:
        yield f"kv_tile {schedule.kv_tile}: must divide {KEYS_OF_A_SCALE}, the keys of a scale"
