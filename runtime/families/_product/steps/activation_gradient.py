"""The gradient of an activation: a matrix times the derivative at what passes."""

from __future__ import annotations

from typing import cast

import torch

from warploom.generator.epilogue import ActivationGradient, Function
from warploom.generator.step import Reads
from warploom.runtime.families._activation import gradient
from warploom.runtime.families._product.steps.operand import Extents, float_type
from warploom.runtime.families._product.steps.step import ROUNDOFF, Draws, Item, TorchStep

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
