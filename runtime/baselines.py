"""What torch computes in the place of a kernel: the same problem, on the same operands.

A family says how (`RuntimeFamily.baselines`); its functions return what the kernel writes. They are
what a user would write, in the types that a user has, so that they round in places where a kernel
does not: their results are held against the kernel's, once that was found right in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from warploom.printable import first_line
from warploom.runtime.contest import Contender
from warploom.runtime.measure import Call
from warploom.runtime.trial import Trial, difference_share

Results = torch.Tensor | Sequence[torch.Tensor]
COMPILED = "torch.compile"


@dataclass(frozen=True, slots=True)
class Baseline:
    """A way of torch's: a function for each set of operands.

    peer       it computes the same. False: a part of it, such as a GEMM without its epilogue,
               which is shown and not compared
    gradients  it runs with autograd on
    """

    name: str
    functions: Sequence[Callable[[], Results]]
    peer: bool = True
    gradients: bool = False


def compiled(function: Callable[..., Results]) -> Callable[..., Results]:
    """The function by torch.compile, made by its first call; what fails is a RuntimeError."""
    made: list[Callable[..., Results]] = []

    def call(*operands: Any) -> Results:
        if not made:
            torch._dynamo.reset()  # or it gives up after a few shapes
            made.append(torch.compile(function, dynamic=False))
        try:
            return made[0](*operands)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # compilers fail in many ways
            raise RuntimeError(f"{type(error).__name__}: {first_line(error)}") from error

    return call


def eager_and_compiled(
    function: Callable[..., Results], operands: Sequence[tuple[Any, ...]], name: str = "torch"
) -> list[Baseline]:
    """A function in eager torch, and by torch.compile, on each set of operands."""
    fast = compiled(function)
    return [
        Baseline(name, [partial(function, *one) for one in operands]),
        Baseline(COMPILED, [partial(fast, *one) for one in operands]),
    ]


def contender(baseline: Baseline, trial: Trial) -> Contender:
    """A baseline in a contest, held against what the kernel left in the trial's first set."""

    def call(function: Callable[[], Results]) -> None:
        with torch.set_grad_enabled(baseline.gradients):
            function()

    def share() -> float:
        with torch.set_grad_enabled(baseline.gradients):
            found = baseline.functions[0]()
        listed = [found] if isinstance(found, torch.Tensor) else list(found)
        kept = list(trial.results)
        if [one.numel() for one in listed] != [one.numel() for one in kept]:
            return math.inf
        pairs = zip(listed, kept, strict=True)
        return max((difference_share(one.detach(), other) for one, other in pairs), default=0.0)

    calls: list[Call] = [partial(call, function) for function in baseline.functions]
    return Contender(baseline.name, calls, share if baseline.peer else None, peer=baseline.peer)
