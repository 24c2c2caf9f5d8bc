"""Decoding in plain torch: what a call computes on CPU tensors, and what kernels are held against.

A call is taken apart into its sequences. Each function takes one and returns its out
[heads, rows, dim] and lse [heads, rows]; `of_call` puts these together again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from warploom.generator.families._attention import UNBOUNDED
from warploom.runtime.accumulation import accumulated
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._attention.function import Function, of_heads
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers.modifier import EXP2_ERROR, FLOAT_ROUNDOFF
from warploom.runtime.families.attention_decode.extents import Extents
from warploom.runtime.families.attention_decode.sequences import Sequence, sequences

if TYPE_CHECKING:
    from warploom.runtime.families.attention_decode.call import AttentionDecodeCall

_CHUNK = 1 << 25  # scores held at a time


Pair = tuple[torch.Tensor, torch.Tensor]  # out and lse
Attention = Callable[[Sequence, Function], Pair]


def attention(one: Sequence, function: Function) -> Pair:
    """Return out and lse in fp32."""
    return _attention(one, function, torch.float32)


def exact(one: Sequence, function: Function) -> Pair:
    """Return out and lse in float64."""
    return _attention(one, function, torch.float64)


def of_call(call: AttentionDecodeCall, sizes: Extents, band: Band, compute: Attention) -> Pair:
    """Apply `compute` to the sequences of a call. Reads lengths, and so waits for a GPU.

    out is as q is, lse [batch, heads, rows], packed [heads, total]; both as wide as computed.
    """
    function = Function(call.scaling, band, call.plain.modifiers)
    out = lse = None
    for rows, one in sequences(call, sizes, band):
        found, logarithms = _by_heads(one, function, compute)
        if out is None or lse is None:
            out = found.new_zeros(call.q.shape)
            lse = logarithms.new_full(sizes.lse_shape, -torch.inf)
        if sizes.packed:
            out[rows], lse[:, rows] = found.transpose(0, 1), logarithms
        else:
            out[rows], lse[rows] = found, logarithms
    if out is None or lse is None:
        wide = call.q.float()
        return torch.zeros_like(wide), wide.new_full(sizes.lse_shape, -torch.inf)
    return out, lse


def _by_heads(one: Sequence, function: Function, compute: Attention) -> Pair:
    """Compute by as many kv heads at a time as have their scores in a chunk."""
    kv_heads, group, rows, dim = one.q.shape
    together = max(1, _CHUNK // max(1, group * rows * one.k.shape[1]))
    parts = [
        compute(
            one.heads(slice(first, first + together)),
            of_heads(function, slice(first * group, (first + together) * group)),
        )
        for first in range(0, kv_heads, together)
    ]
    out, lse = (torch.cat(every) for every in zip(*parts, strict=True))
    return out.reshape(kv_heads * group, rows, dim), lse.reshape(kv_heads * group, rows)


# ---- Steps ---------------------------------------------------------------------------------------


def _attention(one: Sequence, function: Function, wide: torch.dtype) -> Pair:
    s = scores(one, function, wide)
    total = sums(s, function)
    p = (s - total.masked_fill(total == -torch.inf, 0)).exp()
    return weighted(p, one, wide), total.squeeze(-1)


def scores(one: Sequence, function: Function, wide: torch.dtype) -> torch.Tensor:
    """Return the scores [kv_heads, group, rows, keys]; masked ones are -inf."""
    s = one.q.to(wide) @ one.k.to(wide).mT[:, None] * function.scale
    if one.scale_k is not None:
        s = s * one.scale_k.to(wide)[:, None, None]
    for modifier in function.modifiers:
        s = modifier.capped(s)
    return s.masked_fill(~visible(one, function.band), -torch.inf)


def visible(one: Sequence, band: Band) -> torch.Tensor:
    """Return which scores are not masked [rows, keys]; the diagonal ends at the last key."""
    rows, keys = one.q.shape[2], one.k.shape[1]
    row = torch.arange(rows, device=one.q.device)[:, None] + keys - rows
    column = torch.arange(keys, device=one.q.device)
    shown = torch.ones(rows, keys, dtype=torch.bool, device=one.q.device)
    if band.right < UNBOUNDED:
        shown &= column <= row + band.right
    if band.left < UNBOUNDED:
        shown &= column >= row - band.left
    return shown


def sums(s: torch.Tensor, function: Function) -> torch.Tensor:
    """Return the logarithm of each row's sum [kv_heads, group, rows, 1]."""
    column = function.column(s[None])
    s = s if column is None else torch.cat((s, column[0]), -1)
    return s.logsumexp(-1, keepdim=True)


def weighted(p: torch.Tensor, one: Sequence, wide: torch.dtype) -> torch.Tensor:
    """Return p v [kv_heads, group, rows, dim]."""
    if one.scale_v is not None:
        p = p * one.scale_v.to(wide)[:, None, None]
    return p @ one.v.to(wide)[:, None]


# ---- Bounds --------------------------------------------------------------------------------------


def bound(one: Sequence, function: Function) -> Pair:
    """Return how far a kernel's out and lse may be from `exact`, element by element, in float64.

    A score is off by the truncation of q k^T on the tensor core, the roundings of its factors and
    of its argument to exp2, and the approximation of tanh that caps scores. A probability has the
    error of its score, and one rounding to the type of q: of what multiplies v, so that the scale
    of a token counts where it may leave the numbers of that type. Sums of parts of the keys are
    rescaled and added up in fp32. out is then off by at most sum(error of p |v|) + |out| sum(error
    of p), and by its own rounding.
    """
    wide, kind = torch.float64, one.q.dtype
    unit, keys = unit_roundoff(kind), one.k.shape[1]
    finfo = torch.finfo(kind)
    denormal = finfo.smallest_normal * finfo.eps / 2  # rounding below the normal numbers
    added = accumulated(kind, keys) + 2 * FLOAT_ROUNDOFF * (keys + 64)
    s = scores(one, function, wide)
    total = sums(s, function)
    p = (s - total).exp().nan_to_num(0.0)
    top = s.amax(-1, keepdim=True) if keys else total
    error = torch.expm1(_score_error(one, function, s, top.nan_to_num(neginf=0.0))) * p
    relative = error.sum(-1, keepdim=True)
    values = one.v.to(wide).abs()[:, None]
    scales = total.new_ones(1, 1, 1, 1)
    if one.scale_v is not None:
        scales = one.scale_v.to(wide).abs()[:, None, None]
    largest = p.amax(-1, keepdim=True) if keys else p.sum(-1, keepdim=True)
    least = denormal * largest * (p > 0) * (scales if scales.shape[-1] == 1 else 1)
    mass = (p * scales) @ values
    off = ((error + unit * p) * scales + least) @ values
    out = weighted(p, one, wide).abs()
    off += out * relative + added * mass + 4 * FLOAT_ROUNDOFF * mass
    off += unit * (out + off + finfo.smallest_normal)
    logarithm = relative + added
    logarithm += EXP2_ERROR * (1 + total.abs().nan_to_num(posinf=0.0))
    return off, logarithm.squeeze(-1)


def _score_error(
    one: Sequence, function: Function, s: torch.Tensor, top: torch.Tensor
) -> torch.Tensor:
    """Return how far a kernel's s - top may be off, with the error of its exp2."""
    wide = torch.float64
    size = one.q.to(wide).abs() @ one.k.to(wide).abs().mT[:, None] * function.scale
    if one.scale_k is not None:
        size = size * one.scale_k.to(wide).abs()[:, None, None]
    finite = s.masked_fill(s == -torch.inf, 0)
    error = (accumulated(one.q.dtype, one.q.shape[-1]) + 2 * FLOAT_ROUNDOFF) * size + EXP2_ERROR
    error += 6 * FLOAT_ROUNDOFF * (finite.abs() + top.abs())
    error += function.cap_error * finite.abs()
    return error
