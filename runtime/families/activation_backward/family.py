"""What measuring and building ahead of time ask for: calls that are drawn, and what is right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch

from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardShape,
)
from warploom.generator.specification import KernelSpec
from warploom.runtime import measure
from warploom.runtime.elements import TORCH
from warploom.runtime.families.activation_backward import reference
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.sampled import Bound, CallTrial, SampledFamily
from warploom.runtime.trial import generator, wrong


class ActivationBackwardTrial(CallTrial):
    """Calls of which both results are held against float64, where there are two."""

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        for one in self._results():
            one.copy_(wrong(one))
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        both = zip(self._results(), self._bounds, strict=True)
        return max(measure.largest_share(one, *expected) for one, expected in both)

    def _results(self) -> list[torch.Tensor]:
        return [one for one in (self.sets[0].out, self.sets[0].sums_out) if one is not None]

    @cached_property
    def _bounds(self) -> Sequence[Bound]:
        call = self.sets[0]
        found = bounds(call)
        return [
            expected
            for expected, one in zip(found, (call.out, call.sums_out), strict=True)
            if one is not None
        ]


def bounds(call: ActivationBackwardCall) -> tuple[Bound, Bound]:
    """What dz and its sums are in float64, and how far off those of a kernel may be."""
    dtype = call.dy.dtype if call.out is None else call.out.dtype
    return reference.bounds(call.dy, call.z, call.activation, dtype)


class ActivationBackwardRuntime(
    SampledFamily[ActivationBackwardOperation, ActivationBackwardShape]
):
    """Calls of `activation_backward`."""

    function = staticmethod(activation_backward)
    operands = 2

    def call(self, *operands: Any, **keywords: Any) -> ActivationBackwardCall:
        """The call that `activation_backward` makes, for `explain`."""
        return ActivationBackwardCall(*operands, **keywords)

    def draw(
        self,
        operation: ActivationBackwardOperation,
        shape: ActivationBackwardShape,
        device: str,
        random: torch.Generator | None,
    ) -> ActivationBackwardCall:
        """A call with normal operands."""

        def drawn(name: str) -> torch.Tensor:
            made = torch.randn(shape.m, shape.n, generator=random, device=device)
            return made.to(TORCH[name])

        dy, sums = drawn(operation.dy), wrong(torch.empty(shape.n, device=device))
        call = ActivationBackwardCall(
            dy, sums=operation.sums, sums_out=sums if operation.sums else None
        )
        if operation.function != "none":
            call.z, call.activation = drawn(operation.z), operation.function
            call.out = wrong(torch.empty_like(dy, dtype=TORCH[operation.dz]))
        return call

    def trial(
        self,
        operation: ActivationBackwardOperation,
        shape: ActivationBackwardShape,
        device: str,
        seed: int,
    ) -> ActivationBackwardTrial:
        """Calls with operands drawn from a seed."""
        drawn = partial(self.draw, operation, shape, device, generator(device, seed))
        return ActivationBackwardTrial(drawn, self.bound, device)

    def bound(self, call: ActivationBackwardCall) -> Bound:
        """What dz is, or the sums where there is no dz."""
        dz, sums = bounds(call)
        return sums if call.out is None else dz


FAMILY = ActivationBackwardRuntime()
