"""Attention in plain torch: what a call computes on CPU tensors, and what kernels are held against.

Each function takes q [batch, heads, seq_q, dim], k and v [batch, kv_heads, seq_k, dim] and a
`Function`, and returns out and lse; `of_call` applies one to the tensors of a call, sequence by
sequence where they are packed. They work through the rows in chunks, so that memory stays small.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from warploom.runtime.accumulation import accumulated
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._attention.function import (
    Function,
    chunks,
    function_of,
    of_sequence,
)
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers.modifier import EXP2_ERROR, FLOAT_ROUNDOFF, Rows
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families._attention.scores import (
    MOST_DISTANT,
    SMALLEST,
    largest,
    score_error,
    scores,
    softmax,
)

Pair = tuple[torch.Tensor, torch.Tensor]  # out and lse
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Function], Pair]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: Function) -> Pair:
    """Return out in the type of q and lse in fp32, computed in fp32 and rounded once."""
    return _attention(q, k, v, function, torch.float32)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: Function) -> Pair:
    """Return out and lse in float64."""
    out, lse = _attention(q, k, v, function, torch.float64)
    return out, lse


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: Function) -> Pair:
    """Return what the plain torch expression gives in the type of q, each step rounded to it.

    The log-sum-exp is taken in fp32, of scores in the type of q.
    """
    out, lse = _empty(q, v, q.dtype)
    for chunk in chunks(q, k):
        at = (chunk.batch, slice(None), chunk.rows)
        out[at], lse[at] = plain_rows(q, k, v, function, chunk)
    return out, lse


def plain_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: Function, chunk: Rows
) -> Pair:
    """Return `plain` of one chunk; autograd can differentiate it."""
    s = scores(q, k, function, chunk, q.dtype)
    if (column := function.column(s)) is not None:
        s = torch.cat([s, column], -1)
    hidden = s.detach().amax(-1, keepdim=True) == -torch.inf
    p = torch.softmax(s, -1).masked_fill(hidden, 0)[..., : k.shape[2]]
    p = function.weighted(p, chunk)
    return times_values(p, v[chunk.batch]), s.float().logsumexp(-1).flatten(1, 2)


def of_call(call: Arguments, band: Band, compute: Attention) -> Pair:
    """Apply `compute` to a call's tensors. Reads cu_seqlens, and so waits for a GPU."""
    function = function_of(call, band)
    if not call.offsets:
        return compute(call.q, call.k, call.v, function)
    starts_q, starts_k = (offsets.tolist() for offsets in call.offsets)
    total, heads, _ = call.q.shape
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    for index in range(len(starts_q) - 1):
        queries = slice(starts_q[index], starts_q[index + 1])
        keys = slice(starts_k[index], starts_k[index + 1])
        if queries.start == queries.stop:
            continue  # nothing to attend from
        if keys.start == keys.stop and not function.has_column:
            continue  # or to
        one = compute(
            call.q[queries].transpose(0, 1)[None],
            call.k[keys].transpose(0, 1)[None],
            call.v[keys].transpose(0, 1)[None],
            of_sequence(function, index, queries.stop - queries.start, keys.stop - keys.start),
        )
        if out is None or lse is None:
            out = one[0].new_zeros((*call.q.shape[:-1], call.v.shape[-1]))
            lse = one[1].new_full((heads, total), -torch.inf)
        out[queries] = one[0][0].transpose(0, 1)
        lse[:, queries] = one[1][0]
    if out is None or lse is None:
        shape = (*call.q.shape[:-1], call.v.shape[-1])
        return call.q.new_zeros(shape), call.q.new_full((heads, total), -torch.inf)
    return out, lse


# ---- Bounds --------------------------------------------------------------------------------------


def bound(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: Function) -> Pair:
    """Return how far a kernel's out and lse may be from `exact`, element by element, in float64.

    A score is off by the truncation of q k^T on the tensor core, the rounding of its argument to
    exp2, and the approximation of tanh that caps scores. A probability p has the error of its score
    and one rounding to the type of q, relative to the largest of the row. out is then off by at
    most sum(error of p |v|) + |out| sum(error of p), and by its own rounding.
    """
    unit, length = unit_roundoff(q.dtype), k.shape[2]
    smallest = torch.finfo(q.dtype).smallest_normal
    denormal = smallest * torch.finfo(q.dtype).eps / 2  # rounding of a p below the normal numbers
    out, lse = _empty(q, v, torch.float64)
    sums = accumulated(q.dtype, length) + 2 * FLOAT_ROUNDOFF * length
    for chunk in chunks(q, k):
        s = scores(q, k, function, chunk, torch.float64)
        top = largest(s)
        p, total = softmax(s, function)
        p = p.nan_to_num(0.0)
        error = torch.expm1(score_error(q, k, function, chunk, s, top)) * p
        relative = error.sum(-1, keepdim=True)
        if (column := function.column(s)) is not None:
            finite = column.nan_to_num(neginf=0.0)  # a column of -inf has no share, and is not off
            size = finite.abs() + top.abs()
            if function.rounds:  # a difference, which is taken first
                size = (finite - top).abs().clamp(max=MOST_DISTANT)
            off = EXP2_ERROR + 4 * FLOAT_ROUNDOFF * size
            relative += torch.expm1(off) * (column - total).exp().nan_to_num(0.0)
            # Far below its column, what a row has becomes 0 where its factor is no normal number.
            error = error + SMALLEST * (s - top).exp()
        rounded = error + unit * p + denormal * largest(p) * (p > 0)
        p, rounded = function.weighted(p, chunk), function.weighted(rounded, chunk)
        exact_out = times_values(p, v[chunk.batch].double())
        mass = times_values(p, v[chunk.batch].double().abs())
        off = times_values(rounded, v[chunk.batch].double().abs())
        off += exact_out.abs() * relative.flatten(1, 2) + sums * mass
        out[chunk.batch, :, chunk.rows] = off + unit * (exact_out.abs() + off + smallest)
        relative = relative.squeeze(-1) + sums
        relative += EXP2_ERROR * (1 + total.squeeze(-1).abs().nan_to_num(posinf=0.0))
        lse[chunk.batch, :, chunk.rows] = relative.flatten(1, 2)
    return out, lse


# ---- Steps ---------------------------------------------------------------------------------------


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: Function, wide: torch.dtype
) -> Pair:
    out, lse = _empty(q, v, wide if wide == torch.float64 else q.dtype)
    for chunk in chunks(q, k):
        s = scores(q, k, function, chunk, wide)
        p, total = softmax(s, function)
        lse[chunk.batch, :, chunk.rows] = total.squeeze(-1).flatten(1, 2)
        p = function.weighted(p, chunk)
        out[chunk.batch, :, chunk.rows] = times_values(p, v[chunk.batch].to(wide)).to(out.dtype)
    return out, lse


def _empty(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> Pair:
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return out, torch.empty(q.shape[:-1], dtype=wide, device=q.device)


def times_values(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return p v [batch, heads, rows, dim], for p [batch, kv_heads, heads of one, rows, seq_k]."""
    return (p @ v[:, :, None]).flatten(1, 2)


def flops(seq_q: int, seq_k: int, band: Band) -> int:
    """Return the products of one head that the mask leaves, per element of dim: 4 per score.

    Two matrix products, each a multiplication and an addition for every score that is not masked.
    """
    if band.mask == "none":
        return 4 * seq_q * seq_k
    offset = seq_k - seq_q if band.bottom_right else 0
    shown = 0
    for row in range(seq_q):
        first = max(0, row + offset - band.left)
        last = min(seq_k - 1, row + offset + band.right)
        shown += max(0, last - first + 1)
    return 4 * shown


def ulp(dtype: torch.dtype, value: float) -> float:
    """Return the spacing of `dtype` at `value`."""
    finfo = torch.finfo(dtype)
    return finfo.eps * 2.0 ** math.floor(math.log2(max(abs(value), finfo.smallest_normal)))
