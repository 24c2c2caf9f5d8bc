"""The scores of attention in plain torch, and how far off a kernel's may be.

Those of a chunk of rows are [batch, kv_heads, heads of one, rows, seq_k], of q [batch, heads,
seq_q, dim] and k [batch, kv_heads, seq_k, dim].
"""

from __future__ import annotations

import torch

from warploom.generator.families._attention import UNBOUNDED
from warploom.runtime.accumulation import accumulated
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers.modifier import EXP2_ERROR, FLOAT_ROUNDOFF, Rows

SMALLEST = 2.0**-126  # of fp32's normal numbers: exp2 has 0 for less
MOST_DISTANT = 700.0  # of whose negative the exponential is no 0 in float64


def products(
    q: torch.Tensor, k: torch.Tensor, chunk: Rows, dtype: torch.dtype, *, magnitude: bool = False
) -> torch.Tensor:
    """Return q k^T [batch, kv_heads, heads of one, rows, seq_k], of absolute values if asked."""
    kv_heads = k.shape[1]
    together = (kv_heads, q.shape[1] // kv_heads)
    rows = q[chunk.batch, :, chunk.rows].to(dtype)
    queries = rows.reshape(rows.shape[0], *together, *rows.shape[2:])
    keys = k[chunk.batch, :, None].to(dtype).mT
    return queries.abs() @ keys.abs() if magnitude else queries @ keys


def scores(
    q: torch.Tensor, k: torch.Tensor, function: Function, chunk: Rows, dtype: torch.dtype
) -> torch.Tensor:
    """Return the scores of a chunk in `dtype`, each step rounded to it; masked ones are -inf."""
    return changed(capped(q, k, function, chunk, dtype), q, k, function, chunk)


def capped(
    q: torch.Tensor, k: torch.Tensor, function: Function, chunk: Rows, dtype: torch.dtype
) -> torch.Tensor:
    """Return the scores of a chunk before anything is added to them or masked."""
    s = products(q, k, chunk, dtype) * function.scale
    for one in function.modifiers:
        s = one.capped(s)
    return s


def changed(
    s: torch.Tensor, q: torch.Tensor, k: torch.Tensor, function: Function, chunk: Rows
) -> torch.Tensor:
    """Return `capped` scores with what is added to them, and -inf where they are masked."""
    dtype = s.dtype
    s = s + terms(q, k, function, chunk, dtype)
    if function.rounds and dtype == torch.float64:
        s = s.float().double()
    for one in function.modifiers:
        if (shown := one.shown(q, k, chunk)) is not None:
            s = s.masked_fill(~shown, -torch.inf)
    return s.masked_fill(~visible(q, k, function.band, chunk), -torch.inf)


def terms(
    q: torch.Tensor, k: torch.Tensor, function: Function, chunk: Rows, dtype: torch.dtype
) -> torch.Tensor:
    """Return what is added to the scores of a chunk, in `dtype`: of their shape, or a 0."""
    total = torch.zeros((), dtype=dtype, device=q.device)
    for one in function.modifiers:
        if (term := one.term(q, k, chunk, dtype)) is not None:
            total = total + term
    if function.rounds and dtype == torch.float64:  # they are added in fp32, and rounded once
        total = total.float().double()
    return total


def visible(q: torch.Tensor, k: torch.Tensor, band: Band, chunk: Rows) -> torch.Tensor:
    """Return which scores of a chunk are not masked, [rows, seq_k]."""
    seq_q, seq_k = q.shape[2], k.shape[2]
    offset = seq_k - seq_q if band.bottom_right else 0
    row = torch.arange(chunk.rows.start, chunk.rows.stop, device=q.device)[:, None] + offset
    column = torch.arange(seq_k, device=q.device)
    shown = torch.ones(row.shape[0], seq_k, dtype=torch.bool, device=q.device)
    if band.right < UNBOUNDED:
        shown &= column <= row + band.right
    if band.left < UNBOUNDED:
        shown &= column >= row - band.left
    return shown


def largest(s: torch.Tensor) -> torch.Tensor:
    """Return the largest score of each row; 0 where it attends to nothing."""
    if s.shape[-1] == 0:
        return s.new_zeros((*s.shape[:-1], 1))
    return s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)


def softmax(s: torch.Tensor, function: Function) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of rows of scores and their log-sum-exp [.., rows, 1].

    Weights are divided by their sum, which the log-sum-exp of large scores is too coarse for. Those
    of a fully masked row are 0.
    """
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    column = function.column(s)
    top = top if column is None else torch.maximum(top, column)
    base = top.masked_fill(top == -torch.inf, 0)
    weights = (s - base).exp()
    total = weights.sum(-1, keepdim=True)
    total = total if column is None else total + (column - base).exp()
    return weights / total.masked_fill(total == 0, 1), base + total.log()


def score_error(
    q: torch.Tensor,
    k: torch.Tensor,
    function: Function,
    chunk: Rows,
    s: torch.Tensor,
    base: torch.Tensor,
) -> torch.Tensor:
    """Return how far a kernel's s - base may be off, with that of its exp2: s are the scores."""
    size = products(q, k, chunk, torch.float64, magnitude=True) * function.scale
    error = accumulated(q.dtype, q.shape[-1]) * size
    finite = s.masked_fill(s == -torch.inf, 0)
    added = terms(q, k, function, chunk, torch.float64).nan_to_num(neginf=0.0)
    if function.rounds:
        # As far as the sum with the bias moves where the score before it does: both are rounded
        # to fp32, and so to the same number where the bias is large.
        before = capped(q, k, function, chunk, torch.float64)
        error = error + function.cap_error * before.abs()
        error = error + 4 * FLOAT_ROUNDOFF * before.abs()
        ends = [(before + off + added).float().double() - finite for off in (-error, error)]
        moved = torch.maximum(*(end.abs() for end in ends)).masked_fill(s == -torch.inf, 0)
        # What is hidden by more than this has no weight at all: nothing is off by infinity times 0.
        distance = (finite - base).abs().clamp(max=MOST_DISTANT)
        return moved.clamp(max=MOST_DISTANT) + EXP2_ERROR + 4 * FLOAT_ROUNDOFF * distance
    error = error + EXP2_ERROR + 4 * FLOAT_ROUNDOFF * (finite.abs() + base.abs())
    error = error + 8 * FLOAT_ROUNDOFF * added.abs()
    if function.cap_error:
        error += function.cap_error * (finite.abs() + added.abs())
    return error
