"""The sums over the rows of D of what passes."""

from __future__ import annotations

from math import prod

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import ColumnSum
from warploom.generator.step import Reads
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Draws, Item, TorchStep
from warploom.runtime.operands import refuse_repeated


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

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return x

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        return error

    def write(self, x: torch.Tensor, item: Item) -> None:
        """Sums of no rows are 0."""
        one_for_all = item[1].numel() == x.shape[-1]
        rows = x.reshape(-1, x.shape[-1]) if one_for_all and x.shape[-1] else x
        item[1].copy_(rows.double().sum(-2).reshape(item[1].shape))

    def sample(self, step: ColumnSum, draws: Draws, at: Extents) -> Item:
        return ("column_sum", draws.zeros(*at.batches, at.n))
