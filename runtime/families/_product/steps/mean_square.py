"""The mean of squares of each row of D, in shares of 16 columns."""

from __future__ import annotations

from math import prod

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import GROUP, MeanSquare
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import ROUNDOFF, Draws, Item, TorchStep
from warploom.runtime.operands import refuse_repeated
from warploom.runtime.tensors import shown


def groups_of(columns: int) -> int:
    """How many shares the mean of squares of so many columns has."""
    return -(-columns // GROUP)


def shares(x: torch.Tensor) -> torch.Tensor:
    """What each group of columns of x [.., m, n] adds to the mean of squares of its row."""
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -n % GROUP))
    squares = padded.reshape(*x.shape[:-1], groups_of(n), GROUP).square()
    return squares.sum(-1) / max(n, 1)


def checked(item: Item, rows: int, columns: int, device: int) -> torch.Tensor:
    """Check the shares [rows, groups of columns] of an item, and return them.

    Raises ProblemError naming the item, the rule and the fix.
    """
    kind, value = item[0], item[1]
    groups = groups_of(columns)
    if not isinstance(value, torch.Tensor):
        raise ProblemError(
            f"{kind} {shown(value)}", rule="must be a tensor", fix="pass a torch tensor"
        )
    if value.get_device() != device or value.dtype != torch.float32:
        raise ProblemError(
            f"{kind} of {value.dtype} on {value.device}",
            rule="must be fp32 on the device of a and b",
            fix="make it there",
        )
    lies = value.dim() == 2 and (groups < 2 or value.stride(1) == 1)
    if tuple(value.shape) != (rows, groups) or not lies:
        raise ProblemError(
            f"{kind} of shape {list(value.shape)} with strides {list(value.stride())}",
            rule=f"must be [{rows}, {groups}], a share for each row and {GROUP} columns of "
            f"{columns}, with shares of a row next to each other",
            fix=f"make it by torch.empty({rows}, {groups}, device=a.device)",
        )
    return value


class TorchMeanSquare(TorchStep[MeanSquare]):
    """Fills a tensor with the shares of each row's mean of squares, and passes values on."""

    step = MeanSquare
    example = '("mean_square", shares)'
    overwrites = True
    no_gradient = "autograd does not see what depends on the shares that it stores"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[MeanSquare, torch.Tensor]:
        value = checked(item, prod(at.batches) * at.m, at.n, device)
        refuse_repeated(item[0], value)
        return MeanSquare(), value

    def row_pitch(self, value: torch.Tensor, batches: tuple[int, ...]) -> int | None:
        return value.stride(0)

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return x

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        return error

    def write(self, x: torch.Tensor, item: Item) -> None:
        item[1].copy_(shares(x).reshape(item[1].shape))

    def written_bound(
        self, x: torch.Tensor, error: torch.Tensor, item: Item
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What shares are of x, which is off by `error`, and how far off they may be."""
        exact = shares(x)
        own = shares((x.abs() + error).to(x.dtype)) - exact
        return exact.reshape(item[1].shape), (own + 24 * ROUNDOFF * exact).reshape(item[1].shape)

    def sample(self, step: MeanSquare, draws: Draws, at: Extents) -> Item:
        return ("mean_square", draws.zeros(prod(at.batches) * at.m, groups_of(at.n)))
