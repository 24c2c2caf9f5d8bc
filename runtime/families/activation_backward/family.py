"""The gradient of an activation, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from typing import Any

from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardShape,
)
from warploom.runtime.call import Call
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.families.activation_backward.trial import ActivationBackwardTrial, draw
from warploom.runtime.family import RuntimeFamily


class ActivationBackwardRuntime(
    RuntimeFamily[ActivationBackwardOperation, ActivationBackwardShape]
):
    """Calls of `activation_backward`."""

    function = staticmethod(activation_backward)
    operands = 2

    def call(self, *operands: Any, **keywords: Any) -> ActivationBackwardCall:
        """The call that `activation_backward` makes, for `explain`."""
        return ActivationBackwardCall(*operands, **keywords)

    def trial(
        self,
        operation: ActivationBackwardOperation,
        shape: ActivationBackwardShape,
        device: str,
        seed: int,
    ) -> ActivationBackwardTrial:
        """Random calls: see trial.py."""
        return ActivationBackwardTrial(operation, shape, device, seed)

    def calls(
        self, operation: ActivationBackwardOperation, shape: ActivationBackwardShape
    ) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [draw(operation, shape, "meta", None)]


FAMILY = ActivationBackwardRuntime()
