"""What is added: a bias, which is a vector over the columns of D, or a residual of its shape."""

from __future__ import annotations

import torch

from warploom.arguments import is_finite
from warploom.errors import ProblemError
from warploom.generator.epilogue import Bias, Residual
from warploom.generator.step import Reads
from warploom.runtime.families._product.steps.operand import Extents, float_type
from warploom.runtime.families._product.steps.step import ROUNDOFF, Draws, Item, TorchStep
from warploom.runtime.tensors import shown


class TorchBias(TorchStep[Bias]):
    """Plus a vector over columns."""

    step = Bias
    example = '("bias", bias)'

    def reads(self, item: Item) -> Reads:
        return "column"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Bias, torch.Tensor]:
        value = self.tensor(item, at, device)
        return Bias(float_type("bias", value)), value

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return x + self.beside(x, item)

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        return error + ROUNDOFF * (after.abs() + (after - before).abs())

    def sample(self, step: Bias, draws: Draws, at: Extents) -> Item:
        return ("bias", draws.values(step.element, (at.n,)))


class TorchResidual(TorchStep[Residual]):
    """Plus beta times a matrix."""

    step = Residual
    number = "beta"
    example = '("residual", c, 1.0)'
    in_place = True

    def reads(self, item: Item) -> Reads:
        return "fragment"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Residual, torch.Tensor]:
        value = self.tensor(item, at, device)
        return Residual(float_type("residual", value)), value

    def check_finite(self, item: Item) -> None:
        if not is_finite(item[2]):
            raise ProblemError(
                f"beta {shown(item[2])}",
                rule="must be a finite number",
                fix="scale the residual itself",
            )

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return x + item[2] * self.beside(x, item) if item[2] else x

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        return error + ROUNDOFF * (after.abs() + (after - before).abs())

    def sample(self, step: Residual, draws: Draws, at: Extents) -> Item:
        return ("residual", draws.values(step.element, (*at.batches, at.m, at.n)), 1.0)
