"""A preactivation: what passes, stored beside D."""

from __future__ import annotations

import torch

from warploom.generator.epilogue import Preactivation
from warploom.generator.step import Reads
from warploom.runtime.families._product.steps.operand import Extents, float_type, require_each
from warploom.runtime.families._product.steps.step import Draws, Item, TorchStep


class TorchPreactivation(TorchStep[Preactivation]):
    """Stores values in a matrix of D's shape, and passes them on."""

    step = Preactivation
    example = '("preactivation", z)'
    overwrites = True

    def reads(self, item: Item) -> Reads:
        return "fragment"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Preactivation, torch.Tensor]:
        value = self.tensor(item, at, device)
        require_each(item, self.reads(item), value, at)
        return Preactivation(float_type("preactivation", value)), value

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return x

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        return error

    def write(self, x: torch.Tensor, item: Item) -> None:
        item[1].copy_(x.reshape(item[1].shape))

    def sample(self, step: Preactivation, draws: Draws, at: Extents) -> Item:
        return ("preactivation", draws.values(step.element, (*at.batches, at.m, at.n)))
