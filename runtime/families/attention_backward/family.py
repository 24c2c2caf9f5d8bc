"""The family of backward passes, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.generator.launches import DeviceLimits
from warploom.runtime.decision import Choice
from warploom.runtime.families._attention.samples import AttentionData
from warploom.runtime.families.attention_backward.trial import AttentionBackwardTrial
from warploom.runtime.families.attention_forward.call import AttentionCall, gradients_choice
from warploom.runtime.family import RuntimeFamily


class AttentionBackwardRuntime(RuntimeFamily[AttentionBackwardOperation, AttentionShape]):
    """Gradients of calls of `warploom.attention`."""

    def trial(
        self, operation: AttentionBackwardOperation, shape: AttentionShape, device: str, seed: int
    ) -> AttentionBackwardTrial:
        """Random operands and results of an attention: see trial.py."""
        return AttentionBackwardTrial(operation, shape, device, seed)

    def choices(
        self, operation: AttentionBackwardOperation, shape: AttentionShape, target: DeviceLimits
    ) -> list[Choice]:
        """The kernel of the gradients of calls."""
        call = AttentionData(operation, shape, "meta", 0).call(AttentionCall)
        forward = call.draft(target)
        asked = operation.deterministic, None
        return [gradients_choice(forward.choice, forward.details, target, asked)]


FAMILY = AttentionBackwardRuntime()
