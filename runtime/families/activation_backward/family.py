"""The gradient of an activation, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from functools import partial

import torch

from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardShape,
)
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.elements import TORCH
from warploom.runtime.families.activation_backward import reference
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.sampled import Bound, CallTrial, SampledFamily
from warploom.runtime.tensors import normal
from warploom.runtime.trial import wrong


class ActivationBackwardRuntime(
    SampledFamily[ActivationBackwardOperation, ActivationBackwardShape]
):
    """Calls of `activation_backward`."""

    function = staticmethod(activation_backward)
    operands = 2
    called = ActivationBackwardCall

    def draw(
        self,
        operation: ActivationBackwardOperation,
        shape: ActivationBackwardShape,
        device: str,
        random: torch.Generator | None,
    ) -> ActivationBackwardCall:
        """A call with normal operands, whose results have their places; on `meta`, undrawn."""

        def drawn(name: str) -> torch.Tensor:
            made = normal((shape.m, shape.n), random, device)
            return made.to(TORCH[name])

        call = ActivationBackwardCall(drawn(operation.dy), sums=operation.sums)
        if operation.sums:
            call.sums_out = wrong(torch.empty(shape.n, device=device))
        if operation.function != "none":
            call.z, call.activation = drawn(operation.z), operation.function
            call.out = wrong(torch.empty_like(call.dy, dtype=TORCH[operation.dz]))
        return call

    def expected(self, call: ActivationBackwardCall) -> tuple[Bound, Bound]:
        """What dz and its sums are in float64, and how far off those of a kernel may be."""
        dtype = call.dy.dtype if call.out is None else call.out.dtype
        return reference.bounds(call.dy, call.z, call.activation, dtype)

    def baselines(self, operation: ActivationBackwardOperation, trial: CallTrial) -> list[Baseline]:
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
