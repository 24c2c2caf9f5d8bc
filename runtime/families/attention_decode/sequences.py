"""The sequences of a call of decoding: their keys and values are gathered from their pages.

Lengths and pages are kept within the cache, as kernels do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families.attention_decode.extents import Extents, kind_of

if TYPE_CHECKING:
    from warploom.runtime.families.attention_decode.call import AttentionDecodeCall


@dataclass(frozen=True, slots=True)
class Sequence:
    """What one sequence attends with and to.

    q                 [kv_heads, group, rows, dim]
    k, v              [kv_heads, keys, dim], as they lie in the cache
    scale_k, scale_v  fp32, of extents that k without dim has, or 1 in their place
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale_k: torch.Tensor | None
    scale_v: torch.Tensor | None

    def heads(self, chosen: slice) -> Sequence:
        """Some of the kv heads, and the heads of q that share them."""
        parts = (self.scale_k, self.scale_v)
        scale_k, scale_v = (None if one is None else _chosen(one, chosen) for one in parts)
        q, k, v = self.q[chosen], self.k[chosen], self.v[chosen]
        return Sequence(q, k, v, scale_k, scale_v)


def sequences(
    call: AttentionDecodeCall, sizes: Extents, band: Band
) -> Iterator[tuple[slice | int, Sequence]]:
    """Yield each sequence that has rows, and where its rows are in q.

    Keys that come before all that its rows see are left out: what they hold reaches no result.
    """
    together = (sizes.kv_heads, sizes.sharing)
    starts = [0] * sizes.batch if call.cache_leftpad is None else call.cache_leftpad.tolist()
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
                ),
            )


def _places(call: AttentionDecodeCall, sizes: Extents) -> list[int] | list[slice]:
    """Where in q the rows of each sequence are."""
    if call.cu_seqlens_q is None:
        return list(range(sizes.batch))
    ends = [min(max(end, 0), sizes.total_q) for end in call.cu_seqlens_q.tolist()]
    return [
        slice(begin, min(max(end, begin), begin + sizes.seq_q))
        for begin, end in itertools.pairwise(ends)
    ]


def _lengths(call: AttentionDecodeCall, sizes: Extents) -> list[tuple[int, int]]:
    """Of each sequence, where its keys begin in packed keys, and how many count."""
    if call.cu_seqlens_k is not None:
        ends = [min(max(end, 0), sizes.total_k) for end in call.cu_seqlens_k.tolist()]
        return [
            (begin, min(max(end - begin, 0), sizes.seq_k))
            for begin, end in itertools.pairwise(ends)
        ]
    if call.cache_seqlens is None:
        return [(0, sizes.seq_k)] * sizes.batch
    return [(0, min(max(length, 0), sizes.seq_k)) for length in call.cache_seqlens.tolist()]


@dataclass(frozen=True, slots=True)
class Reader:
    """Where the keys of one sequence lie, `length` from `first` or in pages, but the `hidden`."""

    call: AttentionDecodeCall
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
        kind = kind_of(scale, self.call.k)
        if scale is None or kind == "token":
            return None if scale is None else self.rows(scale)
        return scale.reshape(-1, 1)


def _chosen(tensor: torch.Tensor, heads: slice) -> torch.Tensor:
    return tensor if tensor.shape[0] == 1 else tensor[heads]
