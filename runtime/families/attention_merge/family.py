"""Merging, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeShape,
)
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.call import Call
from warploom.runtime.elements import TORCH
from warploom.runtime.families.attention_merge import reference
from warploom.runtime.families.attention_merge.api import merge_state
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.families.attention_merge.trial import AttentionMergeTrial, draw
from warploom.runtime.family import RuntimeFamily


class AttentionMergeRuntime(RuntimeFamily[AttentionMergeOperation, AttentionMergeShape]):
    """Calls of `attention_merge`."""

    function = staticmethod(merge_state)
    operands = 4

    def call(self, *operands: Any, **keywords: Any) -> AttentionMergeCall:
        """The call that `attention_merge` makes, for `explain`."""
        return AttentionMergeCall(*operands, **keywords)

    def trial(
        self,
        operation: AttentionMergeOperation,
        shape: AttentionMergeShape,
        device: str,
        seed: int,
    ) -> AttentionMergeTrial:
        """Random calls: see trial.py."""
        return AttentionMergeTrial(operation, shape, device, seed)

    def calls(
        self, operation: AttentionMergeOperation, shape: AttentionMergeShape
    ) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [draw(operation, shape, "meta", None)]

    def baselines(
        self, operation: AttentionMergeOperation, trial: AttentionMergeTrial
    ) -> list[Baseline]:
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
