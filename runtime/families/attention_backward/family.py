"""The family of backward passes, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.runtime.baselines import Baseline
from warploom.runtime.call import Call
from warploom.runtime.families._attention import sdpa
from warploom.runtime.families._attention.operands import empty_like
from warploom.runtime.families._attention.problem import Arguments, extents
from warploom.runtime.families._attention.samples import AttentionData
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_backward.trial import AttentionBackwardTrial, prepared
from warploom.runtime.family import RuntimeFamily


class AttentionBackwardRuntime(RuntimeFamily[AttentionBackwardOperation, AttentionShape]):
    """Gradients of calls of `warploom.attention`."""

    def trial(
        self, operation: AttentionBackwardOperation, shape: AttentionShape, device: str, seed: int
    ) -> AttentionBackwardTrial:
        """Random operands and results of an attention: see trial.py."""
        return AttentionBackwardTrial(operation, shape, device, seed)

    def calls(
        self, operation: AttentionBackwardOperation, shape: AttentionShape
    ) -> list[Call[Any, Any]]:
        """The backward pass of a call as a model makes it."""
        forward = AttentionData(operation, shape, "meta", 0).call(Arguments)
        forward.deterministic = operation.deterministic
        lse = forward.q.new_empty(extents(forward).lse_shape, dtype=torch.float32)
        out, dout = (empty_like(forward.q, forward.v.shape[-1]) for _ in range(2))
        return [prepared(BackwardCall(forward, out, lse, dout), operation)]

    def baselines(
        self, operation: AttentionBackwardOperation, trial: AttentionBackwardTrial
    ) -> list[Baseline]:
        """The gradients of every backend of torch's sdpa, and of flex_attention."""
        scores = sdpa.scores_of(trial.sets[0].forward, trial.keywords)
        given = [(one.forward.q, one.forward.k, one.forward.v) for one in trial.sets]
        return sdpa.baselines(scores, given, [one.dout for one in trial.sets])


FAMILY = AttentionBackwardRuntime()
