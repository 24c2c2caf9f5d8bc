"""Steps that store something beside D and pass values on: a magnitude, sums, or the values."""

from __future__ import annotations

from math import prod

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import Amax, ColumnSum, Preactivation
from warploom.generator.step import Reads
from warploom.runtime.families._product.steps.operand import Extents, float_type, require_each
from warploom.runtime.families._product.steps.step import Draws, Item, TorchStep
from warploom.runtime.operands import refuse_repeated


class TorchAmax(TorchStep[Amax]):
    """Raises a tensor of one element, and passes values on."""

    step = Amax
    fp32 = True

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Amax, torch.Tensor]:
        return Amax(), self.tensor(item, at, device)

    def write(self, x: torch.Tensor, item: Item) -> None:
        """NaN wins."""
        if x.numel():
            largest = x.abs().max().to(torch.float32)
            item[1].copy_(torch.maximum(item[1], largest.expand_as(item[1])))

    def sample(self, step: Amax, draws: Draws, at: Extents) -> Item:
        return ("amax", draws.zeros(1))


class TorchColumnSum(TorchStep[ColumnSum]):
    """Fills a vector with sums over all rows, or one for each batch over its own."""

    step = ColumnSum
    example = '("column_sum", s)'
    fp32 = True
    overwrites = True

    def reads(self, item: Item) -> Reads:
        return "column"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[ColumnSum, torch.Tensor]:
        value = self.tensor(item, at, device)
        refuse_repeated(item[0], item[1])
        if value.numel() not in (at.n, prod(at.batches) * at.n):
            raise ProblemError(
                f"column_sum of shape {list(item[1].shape)}",
                rule=f"must have shape {[at.n]}, or {[*at.batches, at.n]} for sums of each batch",
                fix="make it in one of these shapes",
            )
        return ColumnSum(), value

    def write(self, x: torch.Tensor, item: Item) -> None:
        """Sums of no rows are 0."""
        one_for_all = item[1].numel() == x.shape[-1]
        rows = x.reshape(-1, x.shape[-1]) if one_for_all and x.shape[-1] else x
        item[1].copy_(rows.double().sum(-2).reshape(item[1].shape))

    def sample(self, step: ColumnSum, draws: Draws, at: Extents) -> Item:
        return ("column_sum", draws.zeros(*at.batches, at.n))


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

    def write(self, x: torch.Tensor, item: Item) -> None:
        item[1].copy_(x.reshape(item[1].shape))

    def sample(self, step: Preactivation, draws: Draws, at: Extents) -> Item:
        return ("preactivation", draws.values(step.element, (*at.batches, at.m, at.n)))
