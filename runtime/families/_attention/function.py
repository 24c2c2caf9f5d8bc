"""What an attention computes between its products, and the chunks that references take it in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from warploom.runtime.families._attention.block_mask import BlockMask
from warploom.runtime.families._attention.dropout import Dropout, keep_of
from warploom.runtime.families._attention.further import four
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.problem import Arguments

_CHUNK = 1 << 25  # scores held at a time
_WHOLE = Band()


@dataclass(frozen=True, slots=True)
class Rows:
    """One chunk of the scores of whole sequences: some of the batch, a range of the rows."""

    batch: slice
    rows: slice


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
    """What is computed between the products: factor, cap, mask, sinks [heads], dropout.

    alibi_slopes [batch or 1, heads], and bias and mask as [batch, heads, seq_q, seq_k] or broadcast
    """

    scale: float
    softcap: float | None = None
    band: Band = _WHOLE
    sinks: torch.Tensor | None = None
    blocks: BlockMask | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    dropout: Dropout | None = None

    def weighted(self, p: torch.Tensor, chunk: Rows) -> torch.Tensor:
        """Weights of a chunk, [batch, kv_heads, heads of one, rows, seq_k], behind the dropout."""
        if self.dropout is None:
            return p
        batches = slice(chunk.batch.start, chunk.batch.start + p.shape[0])
        kept = self.dropout.kept(batches, chunk.rows, p.shape[-1])
        return p * kept.reshape(p.shape) / self.dropout.keep


def function_of(call: Arguments, band: Band) -> Function:
    """Return what a call computes between the products."""
    slopes, bias, mask = call.alibi_slopes, call.bias, call.mask
    state = call.dropout_state if call.dropout_p else None
    dropped = None if state is None else Dropout(state, keep_of(call.dropout_p), call.q.shape[1])
    return Function(
        call.scaling,
        call.softcap,
        band,
        call.sinks,
        call.block_mask,
        None if slopes is None else slopes.reshape(-1, slopes.shape[-1]),
        None if bias is None else four(bias),
        None if mask is None else four(mask),
        dropped,
    )


def of_sequence(function: Function, index: int, rows: int, columns: int) -> Function:
    """Return what is computed of one packed sequence."""
    slopes, bias, mask = function.alibi_slopes, function.bias, function.mask

    def scores_of(one: torch.Tensor | None) -> torch.Tensor | None:
        return None if one is None else _one(one, index)[:, :, :rows, :columns]

    return replace(
        function,
        alibi_slopes=None if slopes is None else _one(slopes, index),
        bias=scores_of(bias),
        mask=scores_of(mask),
        dropout=None if function.dropout is None else replace(function.dropout, batch=index),
    )


def _one(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == 1 else tensor[index : index + 1]
