"""The scores of attention in plain torch, and how far off a kernel's may be.

Those of a chunk of rows are [batch, kv_heads, heads of one, rows, seq_k], of q [batch, heads,
seq_q, dim] and k [batch, kv_heads, seq_k, dim].
"""

from __future__ import annotations

import torch

from warploom.generator.families._attention import UNBOUNDED
from warploom.runtime.accumulation import accumulated
from warploom.runtime.families._attention.function import Function, Rows
from warploom.runtime.families._attention.mask import Band

FLOAT_ROUNDOFF = 2.0**-24  # of one fp32 operation
TANH_ERROR = 2.0**-10.9  # of tanh.approx, relative (PTX ISA)
SMALLEST = 2.0**-126  # of fp32's normal numbers: exp2 has 0 for less
MOST_DISTANT = 700.0  # of whose negative the exponential is no 0 in float64
EXP2_ERROR = 2.0**-21  # of ex2.approx and lg2.approx, with the rounding of their arguments


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
    return s if function.softcap is None else torch.tanh(s / function.softcap) * function.softcap


def changed(
    s: torch.Tensor, q: torch.Tensor, k: torch.Tensor, function: Function, chunk: Rows
) -> torch.Tensor:
    """Return `capped` scores with what is added to them, and -inf where they are masked.

    A score with a bias is an fp32 number in float64, too: a bias of -1e9 over a whole row hides the
    differences of its scores, so that their weights are alike, as torch's math path has them.
    """
    dtype = s.dtype
    s = s + terms(q, k, function, chunk, dtype)
    if function.bias is not None and dtype == torch.float64:
        s = s.float().double()
    if function.mask is not None:
        s = s.masked_fill(~_of_chunk(function.mask, q, k, chunk), -torch.inf)
    if function.blocks is not None:
        shown = function.blocks.dense(chunk.batch, chunk.rows)
        together = s.shape[1:3] if shown.shape[1] > 1 else (1, 1)
        shown = shown.reshape(shown.shape[0], *together, *shown.shape[2:])
        return s.masked_fill(~shown, -torch.inf)
    return s.masked_fill(~visible(q, k, function.band, chunk), -torch.inf)


def terms(
    q: torch.Tensor, k: torch.Tensor, function: Function, chunk: Rows, dtype: torch.dtype
) -> torch.Tensor:
    """Return what is added to the scores of a chunk, in `dtype`: of their shape, or a 0."""
    found = torch.zeros((), dtype=dtype, device=q.device)
    slopes, bias = function.alibi_slopes, function.bias
    if slopes is not None:
        seq_q, seq_k = q.shape[2], k.shape[2]
        row = torch.arange(chunk.rows.start, chunk.rows.stop, device=q.device)[:, None]
        distance = (row + seq_k - seq_q - torch.arange(seq_k, device=q.device)).abs().to(dtype)
        whole = slopes.to(dtype).expand(q.shape[0], q.shape[1])[chunk.batch]
        found = found - grouped(whole, k)[..., None, None] * distance
    if bias is not None:
        found = found + _of_chunk(bias, q, k, chunk).to(dtype)
        if dtype == torch.float64:  # slopes and bias are added in fp32, and rounded once
            found = found.float().double()
    return found


def grouped(tensor: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Tell apart the query heads of each kv head: [batch, kv_heads, heads of one, ..]."""
    heads, kv_heads = tensor.shape[1], k.shape[1]
    return tensor.reshape(tensor.shape[0], kv_heads, heads // kv_heads, *tensor.shape[2:])


def _of_chunk(tensor: torch.Tensor, q: torch.Tensor, k: torch.Tensor, chunk: Rows) -> torch.Tensor:
    whole = tensor.expand(*q.shape[:3], k.shape[2])
    return grouped(whole[chunk.batch, :, chunk.rows], k)


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


def of_sinks(sinks: torch.Tensor, s: torch.Tensor, columns: int) -> torch.Tensor:
    """Return sinks [heads] as so many scores of each row of s, [.., kv_heads, group, rows, ..]."""
    one = sinks.to(s.dtype).reshape(*s.shape[1:3], 1, 1)
    return one.expand(*s.shape[:-1], columns)


def softmax(s: torch.Tensor, function: Function) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of rows of scores and their log-sum-exp [.., rows, 1], sinks included.

    Weights are divided by their sum, which the log-sum-exp of large scores is too coarse for. Those
    of a fully masked row are 0.
    """
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    sink = None if function.sinks is None else of_sinks(function.sinks, s, 1)
    top = top if sink is None else torch.maximum(top, sink)
    base = top.masked_fill(top == -torch.inf, 0)
    weights = (s - base).exp()
    total = weights.sum(-1, keepdim=True)
    total = total if sink is None else total + (sink - base).exp()
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
    if function.bias is not None:
        # As far as the sum with the bias moves where the score before it does: both are rounded
        # to fp32, and so to the same number where the bias is large.
        before = capped(q, k, function, chunk, torch.float64)
        error = error + TANH_ERROR * before.abs() * (function.softcap is not None)
        error = error + 4 * FLOAT_ROUNDOFF * before.abs()
        ends = [(before + off + added).float().double() - finite for off in (-error, error)]
        moved = torch.maximum(*(end.abs() for end in ends)).masked_fill(s == -torch.inf, 0)
        # What is hidden by more than this has no weight at all: nothing is off by infinity times 0.
        distance = (finite - base).abs().clamp(max=MOST_DISTANT)
        return moved.clamp(max=MOST_DISTANT) + EXP2_ERROR + 4 * FLOAT_ROUNDOFF * distance
    error = error + EXP2_ERROR + 4 * FLOAT_ROUNDOFF * (finite.abs() + base.abs())
    error = error + 8 * FLOAT_ROUNDOFF * added.abs()
    if function.softcap is not None:
        error += TANH_ERROR * (finite.abs() + added.abs())
    return error
