"""Calls on random operands, and what their results are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from warploom.generator.families.attention_quantize import (
    AttentionQuantizeOperation,
    AttentionQuantizeShape,
)
from warploom.generator.families.attention_quantize.model import traffic
from warploom.generator.specification import KernelSpec
from warploom.runtime import measure
from warploom.runtime.elements import TORCH
from warploom.runtime.families.attention_quantize import reference
from warploom.runtime.families.attention_quantize.call import AttentionQuantizeCall, Details
from warploom.runtime.families.attention_quantize.reference import Results
from warploom.runtime.plan import run
from warploom.runtime.trial import generator, sets_for, wrong

INTEGERS = {1: torch.uint8, 4: torch.int32}


def draw(
    operation: AttentionQuantizeOperation,
    shape: AttentionQuantizeShape,
    device: str,
    random: torch.Generator | None,
) -> AttentionQuantizeCall:
    """A call whose k and v have a mean, as models' do; results have their places."""
    dtype = TORCH[operation.element]

    def drawn(heads: int, rows: int) -> torch.Tensor:
        """As a projection leaves them: heads of a row are neighbours."""
        sizes = shape.batch, rows, heads, operation.dim
        made = torch.randn(sizes, generator=random, device=device)
        columns = torch.randn(heads, operation.dim, generator=random, device=device)
        return (made + columns).to(dtype).transpose(1, 2)

    v = drawn(shape.kv_heads, shape.seq_k)
    call = AttentionQuantizeCall(v)
    if operation.lengths == "packed":
        total = shape.batch * shape.seq_k
        ends = torch.randint(0, total + 1, (shape.batch,), generator=random, device=device)
        offsets = torch.cat([torch.zeros_like(ends[:1]), ends.sort().values]).int()
        # Rows past the last sequence are of none.
        call = AttentionQuantizeCall(v.transpose(1, 2).flatten(0, 1), cu_seqlens=offsets)
    if operation.quantizes:
        q, k = drawn(shape.heads, shape.seq_q), drawn(shape.kv_heads, shape.seq_k)
        call = AttentionQuantizeCall(v, q, k, operation.scores, operation.smooth)
    return placed(call)


def placed(call: AttentionQuantizeCall) -> AttentionQuantizeCall:
    """The same call, whose results have their places."""
    made = zip(call.declaration.results, call.results(Details(())), strict=True)
    places: dict[str, Any] = dict(made)
    return replace(call, **places)


def results_of(call: AttentionQuantizeCall) -> Results:
    """What a call writes, where it was told where."""
    return (
        *(call.q_out, call.k_out, call.v_out),  # type: ignore[return-value]
        *(call.q_descale, call.k_descale, call.v_descale, call.k_mean, call.score_shift),
    )


def share(call: AttentionQuantizeCall, results: Results) -> float:
    """0 where all is as it must be; 1 at the bounds of sums; else more.

    The mean is held against float64, and all else against what follows from it: every bit, but of
    the products of q and the mean.
    """
    k_mean, shift, worst = results[-2], results[-1], 0.0
    if k_mean is not None and shift is not None and call.q is not None and call.k is not None:
        worst = max(
            measure.largest_share(k_mean, *reference.mean_bound(call.k)),
            measure.largest_share(shift, *reference.shift_bound(call.q, k_mean)),
        )
    right = call.computed_by_torch(k_mean)
    for one, other in zip(results[:-2], right[:-2], strict=True):
        if (one is None) is not (other is None):
            return math.inf
        if one is not None and other is not None and bool(differ(one, other).any()):
            return math.inf
    return worst


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two results have other bits; of NaN any are right."""
    integer = INTEGERS[one.dtype.itemsize]
    other_bits = one.contiguous().view(integer) != other.contiguous().view(integer)
    if one.dtype.is_floating_point:
        other_bits &= ~(one.float().isnan() & other.float().isnan())
    return other_bits


class AttentionQuantizeTrial:
    """Calls of which all results are held against plain torch operations."""

    def __init__(
        self,
        operation: AttentionQuantizeOperation,
        shape: AttentionQuantizeShape,
        device: str,
        seed: int,
    ) -> None:
        random = generator(device, seed)
        sets = sets_for(traffic(operation, shape), device)
        self.sets: Sequence[AttentionQuantizeCall] = [
            draw(operation, shape, device, random) for _ in range(sets)
        ]

    def calls(self, spec: KernelSpec) -> list[measure.Call]:
        """One call of `spec` for each set of operands."""
        return [partial(run, replace(one, spec=spec)) for one in self.sets]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        for one in self.results:
            one.copy_(wrong(one))
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        return share(self.sets[0], results_of(self.sets[0]))

    @cached_property
    def results(self) -> list[torch.Tensor]:
        """What the first set has of values, scales, means and products."""
        return [one for one in results_of(self.sets[0]) if one is not None]


def bytes_of(call: AttentionQuantizeCall) -> int:
    """Bytes of all operands and results: what a call moves that reads everything once."""
    tensors = [one for _, one in call.read()]
    tensors += [one for one in results_of(placed(call)) if one is not None]
    return sum(one.numel() * one.element_size() for one in tensors)
