"""The runtime's half of a family whose calls have one result: what it need not say itself.

Such a family says how a call is drawn and what is right; calls are timed, checked and chosen for
alike. A result is held against float64 as a whole.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime import measure
from warploom.runtime.call import Call
from warploom.runtime.family import OperationT, RuntimeFamily, ShapeT
from warploom.runtime.plan import run
from warploom.runtime.trial import generator, sets_for, wrong

Drawn = Any  # a Call that is a dataclass with the fields `out` and `spec`
Bound = tuple[torch.Tensor, torch.Tensor]  # the exact result, and how far each element may be off


class SampledFamily(RuntimeFamily[OperationT, ShapeT]):
    """A family that draws its calls."""

    @abstractmethod
    def draw(
        self,
        operation: OperationT,
        shape: ShapeT,
        device: str,
        random: torch.Generator | None,
    ) -> Drawn:
        """A call with random dense operands and an `out` on a torch device; on `meta`, undrawn."""

    @abstractmethod
    def bound(self, call: Drawn) -> Bound:
        """What the result is in float64, and how far each element of `out` may be from that."""

    def trial(self, operation: OperationT, shape: ShapeT, device: str, seed: int) -> CallTrial:
        """Calls with operands drawn from a seed."""
        drawn = partial(self.draw, operation, shape, device, generator(device, seed))
        return CallTrial(drawn, self.bound, device)

    def calls(self, operation: OperationT, shape: ShapeT) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [self.draw(operation, shape, "meta", None)]


class CallTrial:
    """A trial of calls that are drawn."""

    def __init__(
        self, draw: Callable[[], Drawn], bound: Callable[[Drawn], Bound], device: str
    ) -> None:
        one = draw()
        tensors = [value for _, value in one.named() if isinstance(value, torch.Tensor)]
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.sets = [one, *(draw() for _ in range(sets_for(moved, device) - 1))]
        self._bound = bound

    def calls(self, spec: KernelSpec) -> list[measure.Call]:
        """One call of `spec` for each set of operands."""
        return [partial(run, replace(one, spec=spec)) for one in self.sets]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        self.sets[0].out.copy_(wrong(self.sets[0].out))
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        return measure.largest_share(self.sets[0].out, *self._expected)

    @property
    def results(self) -> list[torch.Tensor]:
        """The result of the first set."""
        return [self.sets[0].out]

    @cached_property
    def _expected(self) -> Bound:
        return self._bound(self.sets[0])
