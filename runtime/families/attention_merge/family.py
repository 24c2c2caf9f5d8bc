"""Merging, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from functools import partial

import torch

from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeShape,
)
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.elements import TORCH
from warploom.runtime.families.attention_merge import reference
from warploom.runtime.families.attention_merge.api import merge_state
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.sampled import Bound, CallTrial, SampledFamily
from warploom.runtime.tensors import normal
from warploom.runtime.trial import wrong


class AttentionMergeRuntime(SampledFamily[AttentionMergeOperation, AttentionMergeShape]):
    """Calls of `attention_merge`."""

    function = staticmethod(merge_state)
    operands = 4
    called = AttentionMergeCall

    def draw(
        self,
        operation: AttentionMergeOperation,
        shape: AttentionMergeShape,
        device: str,
        random: torch.Generator | None,
    ) -> AttentionMergeCall:
        """A call with normal operands, whose results have their places; on `meta`, undrawn."""

        def drawn(*extents: int) -> torch.Tensor:
            return normal(extents, random, device)

        types = TORCH[operation.a], TORCH[operation.b]
        a, b = (drawn(shape.rows, operation.dim).to(one) for one in types)
        out = wrong(torch.empty_like(a, dtype=TORCH[operation.out]))
        lse_a, lse_b = 3 * drawn(shape.rows), 3 * drawn(shape.rows)
        return AttentionMergeCall(a, lse_a, b, lse_b, out, wrong(lse_a))

    def expected(self, call: AttentionMergeCall) -> tuple[Bound, Bound]:
        """What both results are in float64, and how far off those of a kernel may be."""
        dtype = call.out_a.dtype if call.out is None else call.out.dtype
        return reference.bounds(call.out_a, call.lse_a, call.out_b, call.lse_b, dtype)

    def baselines(self, operation: AttentionMergeOperation, trial: CallTrial) -> list[Baseline]:
        """The expression in torch, eager and compiled."""
        given = [(one.out_a, one.lse_a, one.out_b, one.lse_b) for one in trial.sets]
        return eager_and_compiled(partial(_merged, TORCH[operation.out]), given)


def _merged(
    dtype: torch.dtype,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = reference.attention_merge(out_a.float(), lse_a, out_b.float(), lse_b)
    return out.to(dtype), lse


FAMILY = AttentionMergeRuntime()
