"""Decoding in plain torch: what a call computes on CPU tensors, and what kernels are held against.

A call is taken apart into its sequences, whose keys and values are gathered from their pages. Each
function takes one and returns its out [heads, rows, dim] and lse [heads, rows]; `of_call` puts
these together again. Lengths and pages are kept within the cache, as kernels do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from warploom.generator.families._attention import UNBOUNDED
from warploom.runtime.accumulation import accumulated
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families.attention_decode import cache
from warploom.runtime.families.attention_decode.arguments import Arguments
from warploom.runtime.families.attention_decode.extents import Extents
from warploom.runtime.families.attention_forward.reference import (
    EXP2_ERROR,
    FLOAT_ROUNDOFF,
    TANH_ERROR,
)

_CHUNK = 1 << 25  # scores held at a time


@dataclass(frozen=True, slots=True)
class Sequence:
    """What one sequence attends with and to.

    q                 [kv_heads, group, rows, dim]
    k, v              [kv_heads, keys, dim], as they lie in the cache
    scale_k, scale_v  fp32, of extents that k without dim has, or 1 in their place
    sinks             [kv_heads, group], or None
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale_k: torch.Tensor | None
    scale_v: torch.Tensor | None
    sinks: torch.Tensor | None

    def heads(self, chosen: slice) -> Sequence:
        """Some of the kv heads, and the heads of q that share them."""
        parts = (self.scale_k, self.scale_v, self.sinks)
        scale_k, scale_v, sinks = (None if one is None else _chosen(one, chosen) for one in parts)
        q, k, v = self.q[chosen], self.k[chosen], self.v[chosen]
        return Sequence(q, k, v, scale_k, scale_v, sinks)


@dataclass(frozen=True, slots=True)
class Function:
    """What is computed between the products: the factor, the cap, and the mask."""

    scale: float
    softcap: float | None
    band: Band


Pair = tuple[torch.Tensor, torch.Tensor]  # out and lse
Attention = Callable[[Sequence, Function], Pair]


def attention(one: Sequence, function: Function) -> Pair:
    """Return out and lse in fp32."""
    return _attention(one, function, torch.float32)


def exact(one: Sequence, function: Function) -> Pair:
    """Return out and lse in float64."""
    return _attention(one, function, torch.float64)


def of_call(call: Arguments, sizes: Extents, band: Band, compute: Attention) -> Pair:
    """Apply `compute` to the sequences of a call. Reads lengths, and so waits for a GPU.

    out is as q is, lse [batch, heads, rows], packed [heads, total]; both as wide as computed.
    """
    function = Function(call.scaling, call.softcap, band)
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


def sequences(
    call: Arguments, sizes: Extents, band: Band
) -> Iterator[tuple[slice | int, Sequence]]:
    """Yield each sequence that has rows, and where its rows are in q.

    Keys that come before all that its rows see are left out: what they hold reaches no result.
    """
    together = (sizes.kv_heads, sizes.sharing)
    sinks = None if call.sinks is None else call.sinks.reshape(together)
    starts = [0] * sizes.batch if call.starts is None else call.starts.tolist()
    places = _places(call, sizes)
    for index, (first, length) in enumerate(_lengths(call, sizes)):
        at = places[index]
        q = call.q[at].transpose(0, 1) if sizes.packed else call.q[at]
        if q.numel():
            hidden = max(starts[index], length - q.shape[1] - band.left, 0)
            read = Reader(call, sizes, index, first, length, min(hidden, length))
            yield (
                at,
                Sequence(
                    q.reshape(*together, *q.shape[1:]),
                    read.rows(call.k),
                    read.rows(call.v),
                    read.scale(call.scale_k),
                    read.scale(call.scale_v),
                    sinks,
                ),
            )


def _places(call: Arguments, sizes: Extents) -> list[int] | list[slice]:
    """Where in q the rows of each sequence are."""
    if call.cu_seqlens_q is None:
        return list(range(sizes.batch))
    ends = [min(max(end, 0), sizes.total_q) for end in call.cu_seqlens_q.tolist()]
    return [
        slice(begin, min(max(end, begin), begin + sizes.seq_q))
        for begin, end in itertools.pairwise(ends)
    ]


def _lengths(call: Arguments, sizes: Extents) -> list[tuple[int, int]]:
    """Of each sequence, where its keys begin in packed keys, and how many count."""
    if call.cu_seqlens_k is not None:
        ends = [min(max(end, 0), sizes.total_k) for end in call.cu_seqlens_k.tolist()]
        return [
            (begin, min(max(end - begin, 0), sizes.seq_k))
            for begin, end in itertools.pairwise(ends)
        ]
    if call.lengths is None:
        return [(0, sizes.seq_k)] * sizes.batch
    return [(0, min(max(length, 0), sizes.seq_k)) for length in call.lengths.tolist()]


@dataclass(frozen=True, slots=True)
class Reader:
    """Where the keys of one sequence lie, `length` from `first` or in pages, but the `hidden`."""

    call: Arguments
    sizes: Extents
    index: int
    first: int
    length: int
    hidden: int

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sequence's rows of k or v [kv_heads, keys, dim], or of scales that are indexed so."""
        if self.sizes.keys == "packed":
            return tensor[self.first + self.hidden : self.first + self.length].transpose(0, 1)
        table = self.call.page_table
        if table is None:
            return tensor[self.index, :, self.hidden : self.length]
        used = -(-self.length // self.sizes.page)
        pages = table[self.index, :used].clamp(0, self.sizes.pages - 1).long()
        held = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        found = held[pages].transpose(0, 1).flatten(1, 2)[:, self.hidden : self.length]
        return found.view(tensor.dtype)

    def scale(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        """The sequence's scales [kv_heads or 1, keys or 1]."""
        kind = cache.kind_of(scale, self.call.k)
        if scale is None or kind == "token":
            return None if scale is None else self.rows(scale)
        return scale.reshape(-1, 1)


def _by_heads(one: Sequence, function: Function, compute: Attention) -> Pair:
    """Compute by as many kv heads at a time as have their scores in a chunk."""
    kv_heads, group, rows, dim = one.q.shape
    together = max(1, _CHUNK // max(1, group * rows * one.k.shape[1]))
    parts = [
        compute(one.heads(slice(first, first + together)), function)
        for first in range(0, kv_heads, together)
    ]
    out, lse = (torch.cat(every) for every in zip(*parts, strict=True))
    return out.reshape(kv_heads * group, rows, dim), lse.reshape(kv_heads * group, rows)


def _chosen(tensor: torch.Tensor, heads: slice) -> torch.Tensor:
    return tensor if tensor.shape[0] == 1 else tensor[heads]


# ---- Steps ---------------------------------------------------------------------------------------


def _attention(one: Sequence, function: Function, wide: torch.dtype) -> Pair:
    s = scores(one, function, wide)
    total = sums(s, one)
    p = (s - total.masked_fill(total == -torch.inf, 0)).exp()
    return weighted(p, one, wide), total.squeeze(-1)


def scores(one: Sequence, function: Function, wide: torch.dtype) -> torch.Tensor:
    """Return the scores [kv_heads, group, rows, keys]; masked ones are -inf."""
    s = one.q.to(wide) @ one.k.to(wide).mT[:, None] * function.scale
    if one.scale_k is not None:
        s = s * one.scale_k.to(wide)[:, None, None]
    if function.softcap is not None:
        s = torch.tanh(s / function.softcap) * function.softcap
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


def sums(s: torch.Tensor, one: Sequence) -> torch.Tensor:
    """Return the logarithm of each row's sum [kv_heads, group, rows, 1], with its sink if any."""
    if one.sinks is not None:
        sink = one.sinks.to(s.dtype)[:, :, None, None].expand(*s.shape[:-1], 1)
        s = torch.cat((s, sink), -1)
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
    of its argument to exp2, and the approximation of tanh under a softcap. A probability has the
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
    total = sums(s, one)
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
    if function.softcap is not None:
        error += TANH_ERROR * finite.abs()
    return error
