"""What measuring and building ahead of time ask for: calls that are drawn, and what is right."""

from __future__ import annotations

import torch

from warploom.generator.families.axpy import AxpyOperation, AxpyShape
from warploom.runtime.elements import TORCH
from warploom.runtime.families.axpy import reference
from warploom.runtime.families.axpy.call import AxpyCall
from warploom.runtime.families.axpy.function import axpy
from warploom.runtime.sampled import Bound, SampledFamily
from warploom.runtime.trial import wrong


class AxpyRuntime(SampledFamily[AxpyOperation, AxpyShape]):
    """Calls of `axpy`."""

    function = staticmethod(axpy)
    operands = 2
    called = AxpyCall

    def draw(
        self,
        operation: AxpyOperation,
        shape: AxpyShape,
        device: str,
        random: torch.Generator | None,
    ) -> AxpyCall:
        """A call with normal operands."""
        x, y = (
            torch.randn(shape.n, generator=random, device=device).to(TORCH[operation.element])
            for _ in range(2)
        )
        return AxpyCall(x, y, 0.75, operation.relu, wrong(x))

    def results(self, call: AxpyCall) -> list[torch.Tensor | None]:
        """The one result."""
        return [call.out]

    def expected(self, call: AxpyCall) -> list[Bound]:
        """What is right, and how far off a kernel may be."""
        return [reference.bound(call.x, call.y, call.alpha, relu=call.relu)]


FAMILY = AxpyRuntime()
