"""The gradient of an activation, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardShape,
)
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.call import Call
from warploom.runtime.elements import TORCH
from warploom.runtime.families.activation_backward import reference
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

    def baselines(
        self, operation: ActivationBackwardOperation, trial: ActivationBackwardTrial
    ) -> list[Baseline]:
        """The expression in torch, eager and compiled."""
        given = [(one.dy, one.z, one.activation) for one in trial.sets]
        return eager_and_compiled(partial(_gradient, TORCH[operation.dz], operation.sums), given)


def _gradient(
    dtype: torch.dtype,
    sums: bool,
    dy: torch.Tensor,
    z: torch.Tensor | None,
    activation: str | None,
) -> list[torch.Tensor]:
    """dz where there is one, and the sums of its columns where these are wanted."""
    dz = reference.activation_backward(dy, z, activation)
    found = [] if z is None else [dz.to(dtype)]
    return [*found, dz.sum(0, dtype=torch.float32)] if sums else found


FAMILY = ActivationBackwardRuntime()
