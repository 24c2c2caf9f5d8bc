"""The largest magnitude of what passes."""

from __future__ import annotations

import torch

from warploom.generator.epilogue import Amax
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Draws, Item, TorchStep


class TorchAmax(TorchStep[Amax]):
    """Raises a tensor of one element, and passes values on."""

    step = Amax
    fp32 = True

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Amax, torch.Tensor]:
        return Amax(), self.tensor(item, at, device)

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return x

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        return error

    def write(self, x: torch.Tensor, item: Item) -> None:
        """NaN wins."""
        if x.numel():
            largest = x.abs().max().to(torch.float32)
            item[1].copy_(torch.maximum(item[1], largest.expand_as(item[1])))

    def sample(self, step: Amax, draws: Draws, at: Extents) -> Item:
        return ("amax", draws.zeros(1))
