"""A bias: a vector over the columns of D."""

from __future__ import annotations

import torch

from warploom.generator.epilogue import Bias
from warploom.generator.step import Reads
from warploom.runtime.families._product.steps.operand import Extents, float_type
from warploom.runtime.families._product.steps.step import ROUNDOFF, Draws, Item, TorchStep


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
