"""An RMS norm: the mean of squares of each row of D in shares, and rows scaled by such shares."""

from __future__ import annotations

from math import prod

import torch

from warploom.arguments import is_finite
from warploom.errors import ProblemError
from warploom.generator.epilogue import GROUP, MeanSquare, RmsScale
from warploom.runtime.families._product.steps.operand import Extents, fp32_tensor
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
    kind, value = item[0], fp32_tensor(item, device)
    groups = groups_of(columns)
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


class TorchRmsScale(TorchStep[RmsScale]):
    """Divides each row by the root of the sum of its shares and eps."""

    step = RmsScale
    number = "eps"
    example = '("rms_scale", shares, 1e-6)'
    no_gradient = "its factors depend on a, of which autograd would see half"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[RmsScale, torch.Tensor]:
        return RmsScale(), checked(item, prod(at.batches) * at.m, at.k, device)

    def row_pitch(self, value: torch.Tensor, batches: tuple[int, ...]) -> int | None:
        return value.stride(0)

    def check_finite(self, item: Item) -> None:
        if not is_finite(item[2]) or item[2] < 0:
            raise ProblemError(
                f"eps {shown(item[2])}",
                rule="must be a finite number, 0 or larger",
                fix="pass the eps of the norm, as 1e-6",
            )

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        shares: torch.Tensor = item[1]
        mean = shares.to(x.dtype).sum(-1).reshape(x.shape[:-1])
        factors: torch.Tensor = (mean + item[2]).rsqrt()
        return x * factors.unsqueeze(-1)

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        # Half of what a sum of positive shares is off by: each lane adds its own, then lanes do.
        own: float = (item[1].shape[-1] / 32 + 12) * ROUNDOFF
        return self.apply(error, item).abs() * (1 + own) + own * after.abs()

    def sample(self, step: RmsScale, draws: Draws, at: Extents) -> Item:
        groups = groups_of(at.k)
        return ("rms_scale", draws.scales(prod(at.batches) * at.m, groups) / max(groups, 1), 1e-6)
