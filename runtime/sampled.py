"""The runtime's half of a family whose calls are drawn: what it need not say itself.

Such a family says how a call is drawn and what is right; calls are timed, checked and chosen for
alike. Where it says nothing else, each result is held against float64, as a whole.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
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

Drawn = Any  # a Call that is a dataclass with a field `spec` and its results, which have places
Bound = tuple[torch.Tensor, torch.Tensor]  # the exact result, and how far each element may be off
Results = Sequence[torch.Tensor | None]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class SampledFamily(RuntimeFamily[OperationT, ShapeT]):
    """A family that draws its calls.

    called   makes the calls that `function` makes of its own arguments: their class
    """

    called: Callable[..., Any]

    def call(self, *operands: Any, **keywords: Any) -> Call[Any, Any]:
        """The call that `function` makes, for `explain`."""
        made: Call[Any, Any] = self.called(*operands, **keywords)
        return made

    @abstractmethod
    def draw(
        self,
        operation: OperationT,
        shape: ShapeT,
        device: str,
        random: torch.Generator | None,
    ) -> Drawn:
        """A call with random dense operands and places for results on a device; undrawn on meta."""

    def results(self, call: Drawn) -> Results:
        """What a call writes, where it was told where; None for a result that it has not."""
        return [getattr(call, name) for name in call.declaration.results]

    def moved(self, operation: OperationT, shape: ShapeT, call: Drawn) -> int:
        """Bytes of the operands of a call, by which sets of them outlast the L2 cache."""
        return sum(one.nbytes for _, one in call.named() if isinstance(one, torch.Tensor))

    def blank(self, result: torch.Tensor) -> None:
        """Fill a result with what no call writes."""
        result.copy_(wrong(result))

    @abstractmethod
    def expected(self, call: Drawn) -> Any:  # noqa: ANN401 (what `share` takes)
        """What is right: a Bound of each result, or what `share` holds them against."""

    def share(self, results: Results, expected: Any) -> float:  # noqa: ANN401
        """The largest error of what a call wrote, as a share of its bound."""
        return share(results, expected)

    def trial(self, operation: OperationT, shape: ShapeT, device: str, seed: int) -> CallTrial:
        """Calls with operands drawn from a seed."""
        return CallTrial(self, operation, shape, device, seed)

    def calls(self, operation: OperationT, shape: ShapeT) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [self.draw(operation, shape, "meta", None)]


class CallTrial:
    """A trial of calls that are drawn."""

    def __init__(
        self,
        family: SampledFamily[OperationT, ShapeT],
        operation: OperationT,
        shape: ShapeT,
        device: str,
        seed: int,
    ) -> None:
        draw = partial(family.draw, operation, shape, device, generator(device, seed))
        one = draw()
        sets = sets_for(family.moved(operation, shape, one), device)
        self.sets = [one, *(draw() for _ in range(sets - 1))]
        self._family: SampledFamily[Any, Any] = family

    def calls(self, spec: KernelSpec) -> list[measure.Call]:
        """One call of `spec` for each set of operands."""
        return [partial(run, replace(one, spec=spec)) for one in self.sets]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        for one in self.results:
            self._family.blank(one)
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        return self._family.share(self._family.results(self.sets[0]), self._expected)

    @property
    def results(self) -> list[torch.Tensor]:
        """The results of the first set."""
        return [one for one in self._family.results(self.sets[0]) if one is not None]

    @cached_property
    def _expected(self) -> Any:  # noqa: ANN401
        return self._family.expected(self.sets[0])


# ---- What results are held against ---------------------------------------------------------------


def share(results: Results, expected: Sequence[Bound]) -> float:
    """The largest error of the results that there are, as a share of its bound."""
    held = zip(results, expected, strict=True)
    return max(measure.largest_share(one, *bound) for one, bound in held if one is not None)


def bits_share(results: Results, right: Results) -> float:
    """0 where all bits are right, else more than 1: how many numbers differ, and one more."""
    both = [(one, other) for one, other in zip(results, right, strict=True) if one is not None]
    apart = sum(int(differ(one, other).sum()) for one, other in both if other is not None)
    return float(apart + 1 if apart else 0)


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two results have other bits; of NaN any are right."""
    integer = _INTEGERS[one.dtype.itemsize]
    bits = one.contiguous().view(integer) != other.contiguous().view(integer)
    if one.dtype.is_floating_point:
        bits &= ~(one.float().isnan() & other.float().isnan())
    return bits
