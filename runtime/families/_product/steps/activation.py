"""An activation, and the derivative of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F

from warploom.errors import ProblemError
from warploom.generator.epilogue import Activation, ActivationGradient, Function
from warploom.generator.step import Reads
from warploom.runtime.families._activation import gradient
from warploom.runtime.families._product.steps.operand import Extents, float_type
from warploom.runtime.families._product.steps.step import (
    ROUNDOFF,
    Draws,
    Flat,
    Given,
    Item,
    TorchStep,
)
from warploom.runtime.tensors import shown

STEEPEST = 1.13  # the largest slope of an activation (gelu's)
FUNCTION_ERROR = 2.0**-21  # of an activation, relative to its argument: mostly the fast exp's
_REFUSED = "activation "  # before a function that there is not, which is refused where it runs

FUNCTIONS: dict[Function, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class TorchActivation(TorchStep[Activation]):
    """A function that its name says."""

    step = Activation
    example = '("activation", "relu")'

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Activation, None]:
        if not isinstance(item[1], str) or item[1] not in FUNCTIONS:
            raise ProblemError(
                f"activation {shown(item[1])}",
                rule=f"must be one of {', '.join(FUNCTIONS)}",
                fix="use one of them, or apply it to the result",
            )
        return Activation(item[1]), None

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return FUNCTIONS[item[1]](x)

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        # Far from 0 the functions are 0 or x itself; near it, their factor of x cancels.
        own = 0.0 if item[1] == "relu" else FUNCTION_ERROR
        return STEEPEST * error + own * (after.abs() + before.abs().clamp(max=8))

    def sample(self, step: Activation, draws: Draws, at: Extents) -> Item:
        return ("activation", step.function)

    def flatten(self, item: Item, into: Flat) -> None:
        into.words.append(item[1] if item[1] in FUNCTIONS else f"{_REFUSED}{item[1]}")

    def owns(self, word: str) -> bool:
        return word in FUNCTIONS or word.startswith(_REFUSED)

    def unflatten(self, word: str, given: Given) -> Item:
        return ("activation", word.removeprefix(_REFUSED))


_SUFFIX = "_gradient"


def _function(item: Item) -> Function:
    return cast("Function", item[0].removesuffix(_SUFFIX))


class TorchActivationGradient(TorchStep[ActivationGradient]):
    """What the loss changes by, with x, where it changes by dy with the function of x."""

    step = ActivationGradient
    example = '("gelu_gradient", dy)'

    def reads(self, item: Item) -> Reads:
        return "fragment"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[ActivationGradient, torch.Tensor]:
        value = self.tensor(item, at, device)
        return ActivationGradient(_function(item), float_type(item[0], value)), value

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return self.beside(x, item) * gradient.slope(_function(item), x)

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        moved = gradient.slope_error(_function(item), before, error)
        return self.beside(before, item).abs() * moved + ROUNDOFF * after.abs()

    def sample(self, step: ActivationGradient, draws: Draws, at: Extents) -> Item:
        dy = draws.values(step.element, (*at.batches, at.m, at.n))
        return (f"{step.function}{_SUFFIX}", dy)
