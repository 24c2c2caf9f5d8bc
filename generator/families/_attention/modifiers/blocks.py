"""A mask of blocks: kernels work only on the tiles that lists name, of which some have masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from warploom.generator.families._attention.modifiers.modifier import Modifier
from warploom.generator.parameters import Field, int32, pointer

MASK_BITS = 64  # of a mask, that a thread of the forward pass loads at once
MOST_LISTED = 128  # rows of a tile of the forward pass that walks lists
CROWDED_REGISTERS = 12  # of the backward pass, where nothing else leaves room for masks


class Blocks(Modifier):
    """Leave out scores by their blocks, and by bits inside of some."""

    name = "blocks"
    doc = (
        "block-sparse attention: only the tiles in a list are computed, some of them with "
        "a mask of bits"
    )
    place = 20
    feature = True

    def reasons(self) -> Sequence[str | None]:
        operation = self.operation
        columns = [other for other in operation.modifiers if other.column]
        return [
            None
            if operation.mask == "none"
            else f"mask {operation.mask} with blocks: lists and their masks say which scores "
            "count; take none, and hide the rest in mask_mod",
            None
            if operation.lengths == "fixed"
            else "lengths packed with blocks: lists are of one length; take fixed, and a "
            "mask_mod that tells sequences apart",
            *(
                f"{other.name} {other.value} with blocks: no kernel has both; take none"
                for other in columns
            ),
            None
            if not operation.scored
            else "alibi, bias or masked with blocks: no kernel has both; hide scores in "
            "mask_mod, or leave out blocks",
        ]

    def forward_reasons(self, schedule: Any) -> Sequence[str | None]:  # noqa: ANN401
        return [
            None
            if schedule.q_tile <= MOST_LISTED
            else f"q_tile {schedule.q_tile} with blocks: three warpgroups have no registers for "
            f"masks; take {MOST_LISTED} or 64",
            None
            if schedule.kv_tile % MASK_BITS == 0
            else f"kv_tile {schedule.kv_tile} with blocks: masks are read {MASK_BITS} columns at a "
            "time; take 64 or 128",
        ]

    def tile_parameters(self, *types: str) -> Sequence[Field[Any]]:
        def lists_of_batch(at: Any) -> int:  # noqa: ANN401 (a launch of either pass)
            heads = at.problem.heads if at.problem.lists_of_heads else 1
            return heads * at.lists if at.problem.lists_of_batches else 0

        header, entry, mask = types
        bits = f"[mask, {mask}]: a bit for every score, 1 where it counts"
        return [
            pointer("lists", header, "of each tile, what is listed: [batch, head, tile]"),
            pointer("listed", entry, "[batch, head, tile, list_tiles]"),
            pointer("masks", "uint32_t", bits),
            int32("list_tiles", "that a list has room for", lambda at: at.list_tiles),
            int32("list_batch", "lists of a batch; 0: all have the same", lists_of_batch),
            int32(
                "list_head",
                "lists of a head; 0: all have the same",
                lambda at: at.lists if at.problem.lists_of_heads else 0,
            ),
        ]

    def forward_registers(self, schedule: Any) -> int:  # noqa: ANN401
        registers: int = schedule.kv_tile // 16  # bits of two rows
        return registers

    def backward_registers(self, schedule: Any, q_rows: int, columns: int) -> int:  # noqa: ANN401
        direct = schedule.accumulate == "direct"
        held = schedule.v_in_registers != "none"
        crowded = direct if schedule.overlap else held and not direct
        return CROWDED_REGISTERS if crowded else 0
