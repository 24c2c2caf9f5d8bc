"""The family of forward passes, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.launches import DeviceLimits
from warploom.runtime.baselines import Baseline
from warploom.runtime.call import Call, Draft
from warploom.runtime.dispatch import Choice
from warploom.runtime.families._attention import sdpa
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families._attention.samples import AttentionData
from warploom.runtime.families.attention_forward import api
from warploom.runtime.families.attention_forward.call import (
    AttentionCall,
    Details,
    gradients_choice,
)
from warploom.runtime.families.attention_forward.eight_bit_call import (
    EightBitCall,
    call_of,
)
from warploom.runtime.families.attention_forward.eight_bit_trial import EightBitTrial
from warploom.runtime.families.attention_forward.plan import AttentionPlan
from warploom.runtime.families.attention_forward.trial import AttentionTrial
from warploom.runtime.family import RuntimeFamily
from warploom.runtime.plan import Plan, make


class AttentionForwardRuntime(RuntimeFamily[AttentionOperation, AttentionShape]):
    """Calls of `warploom.attention`."""

    function = staticmethod(api.attention)
    call = staticmethod(call_of)
    operands = 3
    unnamed = True

    def trial(
        self, operation: AttentionOperation, shape: AttentionShape, device: str, seed: int
    ) -> AttentionTrial:
        """Random operands of an attention: see trial.py, and eight_bit_trial.py."""
        if operation.eight:
            return EightBitTrial(operation, shape, device, seed)
        return AttentionTrial(operation, shape, device, seed)

    def calls(self, operation: AttentionOperation, shape: AttentionShape) -> list[Call[Any, Any]]:
        """A call as a model makes it."""
        if operation.eight:
            return [EightBitTrial(operation, shape, "meta", 0).eight_bit_call()]
        return [AttentionData(operation, shape, "meta", 0).call(AttentionCall)]

    def plan(self, call: Call[Any, Any]) -> Plan[Any, Any]:
        """The plan of an attention."""
        if isinstance(call, EightBitCall):
            return make(call, Plan)
        return make(call, AttentionPlan)

    def gradients(self, drafted: Draft[Details], target: DeviceLimits) -> Choice | None:
        """The kernel of the backward pass, which attention of 8 bits has not, nor of any dims."""
        is_eight = getattr(drafted.choice.spec.operation, "eight", False)  # or it is of decoding
        if is_eight or not drafted.details.sizes.has_gradients:
            return None
        return gradients_choice(drafted.choice, drafted.details, target)

    def rehearse(self) -> None:
        """Attend on the CPU."""
        one = torch.ones(1, 1, 8, 64, dtype=torch.bfloat16)
        api.attention(one, one, one)

    def baselines(self, operation: AttentionOperation, trial: AttentionTrial) -> list[Baseline]:
        """Every backend of torch's sdpa, and flex_attention; none of them takes 8 bits."""
        if operation.eight:
            return []
        one = trial.sets[0]
        call = Arguments(one.q, one.k, one.v, **one.lengths, **trial.keywords)
        given = [(one.q, one.k, one.v) for one in trial.sets]
        return sdpa.baselines(sdpa.scores_of(call, trial.keywords), given)


FAMILY = AttentionForwardRuntime()
