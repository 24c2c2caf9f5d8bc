"""What an attention computes between its GEMMs, and the chunks that references take it in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers.modifier import Modifier, Rows
from warploom.runtime.families._attention.problem import Arguments

_CHUNK = 1 << 25  # scores held at a time
_WHOLE = Band()


def chunks(q: torch.Tensor, k: torch.Tensor) -> Iterator[Rows]:
    """Cover the batch and the rows in chunks of at most _CHUNK scores (but at least one row)."""
    batch, heads, seq_q, _ = q.shape
    row = max(1, heads * k.shape[2])
    rows = max(1, min(seq_q, _CHUNK // row))
    together = max(1, _CHUNK // (row * rows)) if rows == seq_q else 1
    for first in range(0, batch, together):
        for row in range(0, seq_q, rows):
            yield Rows(slice(first, first + together), slice(row, min(row + rows, seq_q)))


@dataclass(frozen=True, slots=True)
class Function:
    """What is computed between the GEMMs: a factor, a mask, and what modifies it further."""

    scale: float
    band: Band = _WHOLE
    modifiers: tuple[Modifier, ...] = ()

    @property
    def rounds(self) -> bool:
        """Whether scores are rounded to fp32 behind what is added to them."""
        return any(one.rounds for one in self.modifiers)

    @property
    def cap_error(self) -> float:
        """The relative error of scores before anything is added to them, beside their GEMM's."""
        return sum(one.cap_error for one in self.modifiers)

    @property
    def has_column(self) -> bool:
        """Whether rows have a sum without a key, too."""
        return any(one.has_column for one in self.modifiers)

    def column(self, s: torch.Tensor) -> torch.Tensor | None:
        """What counts in the sums of rows of s beside their scores, [.., rows, 1]."""
        columns = (one.column(s) for one in self.modifiers)
        return next((column for column in columns if column is not None), None)

    def fully_masked(self, lse: torch.Tensor) -> torch.Tensor:
        """Which rows are fully masked, by their log-sum-exp [batch, heads, rows]."""
        masked = lse == -torch.inf
        for one in self.modifiers:
            if (rows := one.fully_masked(lse)) is not None:
                masked = masked | rows
        return masked

    def weighted(self, p: torch.Tensor, chunk: Rows) -> torch.Tensor:
        """Weights of a chunk, [batch, kv_heads, heads of one, rows, seq_k], behind the softmax."""
        for one in self.modifiers:
            p = one.weighted(p, chunk)
        return p


def function_of(call: Arguments, band: Band) -> Function:
    """Return what a call computes between the GEMMs."""
    return Function(call.scaling, band, call.modifiers)


def of_heads(function: Function, heads: slice) -> Function:
    """Return what is computed of some of the query heads."""
    own = (one.of_heads(heads) for one in function.modifiers)
    return replace(function, modifiers=tuple(own))


def of_sequence(function: Function, index: int, rows: int, columns: int) -> Function:
    """Return what is computed of one packed sequence."""
    own = (one.of_sequence(index, rows, columns) for one in function.modifiers)
    return replace(function, modifiers=tuple(own))
