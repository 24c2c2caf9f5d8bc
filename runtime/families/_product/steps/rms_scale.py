"""RMS norm of A's rows, by a factor for each row of D."""

from __future__ import annotations

from math import prod

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import RmsScale
from warploom.runtime.families._product.steps.mean_square import checked, groups_of
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import ROUNDOFF, Draws, Item, TorchStep, finite
from warploom.runtime.tensors import shown


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
        if not finite(item[2]) or item[2] < 0:
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
