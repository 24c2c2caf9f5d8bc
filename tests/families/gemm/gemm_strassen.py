"""Operands of products by Strassen's algorithm."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """M, N and K, and the types of operands and result."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    out: torch.dtype

    def __str__(self) -> str:
        types = "_".join(str(one).removeprefix("torch.") for one in (self.dtype, self.out))
        return "x".join(map(str, self.shape)) + "_" + types


def operands(
    case: Case, device: str = "cpu", layouts: str = "row_row"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random a and b, each row-major or column-major."""
    m, n, k = case.shape
    random = torch.Generator(device).manual_seed(0)
    drawn: list[torch.Tensor] = []
    for extents, layout in zip(((m, k), (k, n)), layouts.split("_"), strict=True):
        extents = extents if layout == "row" else extents[::-1]
        one = torch.randn(extents, generator=random, device=device).to(case.dtype)
        drawn.append(one if layout == "row" else one.t())
    return drawn[0], drawn[1]
