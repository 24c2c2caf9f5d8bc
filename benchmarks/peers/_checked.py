"""What contenders of libraries have in common: a first call, how they refuse, what is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from warploom.runtime.contest import Contender
from warploom.runtime.measure import Call, largest_share
from warploom.runtime.plan import Plan, heard

CallT = TypeVar("CallT", bound=Call)


@dataclass(frozen=True, slots=True)
class Right:
    """A result in float64, how far off each element may be, and all of them together."""

    exact: torch.Tensor
    bound: torch.Tensor
    spread: float

    def share(self, out: torch.Tensor) -> float:
        """The largest error of an element, or that of all, as a share of what it may be."""
        if out.shape != self.exact.shape:
            return math.inf
        together = float((out.double() - self.exact).norm() / self.exact.norm()) / self.spread
        if math.isnan(together):
            return math.inf
        return max(together, largest_share(out, self.exact, self.bound))


def kernels_of(call: Call) -> tuple[str, str]:
    """Make a call of Warploom's: the kernels that it runs, and what decided on each."""
    plans: list[Plan[Any, Any]] = []
    with heard(plans.append):
        call()
    found = dict.fromkeys((one.choice.spec.name, one.choice.reason) for one in plans)
    names, reasons = zip(*found, strict=True) if found else ((), ())
    return " + ".join(names), " + ".join(reasons)


def tried(
    name: str,
    make: Callable[[], Sequence[CallT]],
    error_share: Callable[[Sequence[CallT]], float],
    told: Callable[[CallT], tuple[str, str]] | None = None,
    *,
    peer: bool = False,
) -> Contender:
    """A contender whose first call is made here, since libraries refuse in many ways; or why not.

    `error_share` is asked with all of its calls, `told` with the first.
    """
    try:
        calls = make()
        calls[0]()
    except torch.AcceleratorError:  # the process can use its GPU no more
        raise
    except Exception as error:
        return Contender(name, [refusal(reason(error))], peer=peer)
    explain = told and partial(told, calls[0])
    return Contender(name, calls, partial(error_share, calls), explain, peer)


def reason(error: Exception) -> str:
    """What a library said in its first line; with the kind of an error that has none of its own."""
    words = str(error).strip().partition("\n")[0]
    if isinstance(error, RuntimeError | ValueError) and words:
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def refusal(words: str) -> Call:
    """A call that says what an earlier one did."""

    def call() -> None:
        raise RuntimeError(words)

    return call
