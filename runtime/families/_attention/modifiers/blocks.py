"""A mask of blocks: kernels work only on the tiles that lists name. mask.py checks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from warploom.runtime.families._attention.block_mask import BlockMask
from warploom.runtime.families._attention.modifiers.modifier import Fields, Modifier, Rows

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments


@dataclass(frozen=True, slots=True)
class Blocks(Modifier):
    """Leave out scores by their blocks, and by bits inside of some."""

    mask: BlockMask
    argument: ClassVar[str] = "block_mask"

    @classmethod
    def of(cls, call: Arguments) -> Self | None:
        return None if call.block_mask is None else cls(call.block_mask)

    def fields(self, call: Arguments) -> Fields:
        return {"blocks": True}

    def problem(self, call: Arguments, copies: tuple[str, ...]) -> Fields:
        """Whose lists there are."""
        batch, heads = self.mask.places.shape[:2]
        return {"lists_of_batches": batch > 1, "lists_of_heads": heads > 1}

    def shown(self, q: torch.Tensor, k: torch.Tensor, chunk: Rows) -> torch.Tensor:
        shown = self.mask.dense(chunk.batch, chunk.rows)
        kv_heads = k.shape[1]
        together = (kv_heads, q.shape[1] // kv_heads) if shown.shape[1] > 1 else (1, 1)
        return shown.reshape(shown.shape[0], *together, *shown.shape[2:])
