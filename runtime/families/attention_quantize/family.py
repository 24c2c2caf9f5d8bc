"""Quantization of attention, as measuring and building ahead of time ask for it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from warploom.generator.families.attention_quantize import (
    AttentionQuantizeOperation,
    AttentionQuantizeShape,
)
from warploom.runtime import measure
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.elements import TORCH
from warploom.runtime.families.attention_quantize import reference
from warploom.runtime.families.attention_quantize.api import attention_quantize
from warploom.runtime.families.attention_quantize.call import AttentionQuantizeCall, Details
from warploom.runtime.sampled import CallTrial, Results, SampledFamily, differ
from warploom.runtime.tensors import normal


class AttentionQuantizeRuntime(SampledFamily[AttentionQuantizeOperation, AttentionQuantizeShape]):
    """Calls of `attention_quantize`."""

    function = staticmethod(attention_quantize)
    operands = 3

    def call(self, *operands: Any, **keywords: Any) -> AttentionQuantizeCall:
        """The call that `attention_quantize` makes, for `explain`."""
        q, k, v = operands
        return AttentionQuantizeCall(v, q, k, **keywords)

    def draw(
        self,
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
            made = normal(sizes, random, device)
            columns = normal((heads, operation.dim), random, device)
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

    def expected(self, call: AttentionQuantizeCall) -> AttentionQuantizeCall:
        """The call: what is right of most results follows from the mean that is among them."""
        return call

    def share(self, results: Results, expected: AttentionQuantizeCall) -> float:
        """0 where all is as it must be; 1 at the bounds of sums; else more.

        The mean is held against float64, and all else against what follows from it: every bit, but
        of the products of q and the mean.
        """
        call, k_mean, shift, worst = expected, results[-2], results[-1], 0.0
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

    def baselines(self, operation: AttentionQuantizeOperation, trial: CallTrial) -> list[Baseline]:
        """The same operations in torch, eager and compiled."""
        read = [(one.v, one.q, one.k, one.cu_seqlens) for one in trial.sets]
        return eager_and_compiled(partial(_quantized, operation), read)


def placed(call: AttentionQuantizeCall) -> AttentionQuantizeCall:
    """The same call, whose results have their places."""
    made = zip(call.declaration.results, call.results(Details(())), strict=True)
    places: dict[str, Any] = dict(made)
    return replace(call, **places)


def bytes_of(call: AttentionQuantizeCall) -> int:
    """Bytes of all operands and results: what a call moves that reads everything once."""
    tensors = [one for _, one in call.read()]
    tensors += [one for one in FAMILY.results(placed(call)) if one is not None]
    return sum(one.numel() * one.element_size() for one in tensors)


def _quantized(
    operation: AttentionQuantizeOperation,
    v: torch.Tensor,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> list[torch.Tensor]:
    scores, smooth = operation.scores, operation.smooth
    call = AttentionQuantizeCall(v, q, k, scores, smooth, cu_seqlens=cu_seqlens)
    return [one for one in call.computed_by_torch() if one is not None]


FAMILY = AttentionQuantizeRuntime()
