"""The family of forward passes, as measuring and building ahead of time ask for it."""

from __future__ import annotations

import torch

from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.launches import DeviceLimits
from warploom.runtime import api
from warploom.runtime.decision import Choice
from warploom.runtime.families._attention.samples import AttentionData
from warploom.runtime.families.attention_forward.call import AttentionCall
from warploom.runtime.families.attention_forward.trial import AttentionTrial
from warploom.runtime.family import RuntimeFamily


class AttentionForwardRuntime(RuntimeFamily[AttentionOperation, AttentionShape]):
    """Calls of `warploom.attention`."""

    def trial(
        self, operation: AttentionOperation, shape: AttentionShape, device: str, seed: int
    ) -> AttentionTrial:
        """Random operands of an attention: see trial.py."""
        return AttentionTrial(operation, shape, device, seed)

    def choices(
        self, operation: AttentionOperation, shape: AttentionShape, target: DeviceLimits
    ) -> list[Choice]:
        """The kernel of calls."""
        call = AttentionData(operation, shape, "meta", 0).call(AttentionCall)
        return [call.draft(target).choice]

    def rehearse(self) -> None:
        """Attend on the CPU."""
        one = torch.ones(1, 1, 8, 64, dtype=torch.bfloat16)
        api.attention(one, one, one)


FAMILY = AttentionForwardRuntime()
