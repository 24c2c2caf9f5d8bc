"""Operands of products by Strassen's algorithm, and how far a result may be from what it has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.runtime.accumulation import accumulated
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._product.steps.step import ROUNDOFF
from warploom.runtime.families.gemm.strassen import LEVELS as ALGORITHMS
from warploom.runtime.families.gemm.strassen import strassen_exact
from warploom.runtime.measure import largest_share


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


def held(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, algorithm: str) -> float:
    """Return the largest error of d = a b by an algorithm, each as a share of its own bound.

    The bound is that of accumulation in fp32 around what the algorithm has, whose S and T are
    rounded. Rims are ordinary products.
    """
    levels = ALGORITHMS[algorithm]
    least = 8 << levels
    m, n, k = d.shape[0] // least * least, d.shape[1] // least * least, a.shape[1]
    exact, magnitude = strassen_exact(a, b, 0)
    error = accumulated(a.dtype, k) * magnitude
    fill = (0, -k % least)
    left = torch.nn.functional.pad(a[:m], fill)
    right = torch.nn.functional.pad(b[:, :n].t(), fill).t()
    inner, sums = strassen_exact(left, right, levels)
    exact[:m, :n] = inner
    additions = 4 * levels * ROUNDOFF
    error[:m, :n] = (accumulated(a.dtype, left.shape[1] >> levels) + additions) * sums
    unit = unit_roundoff(d.dtype)
    smallest = torch.finfo(d.dtype).tiny if unit else 0.0
    return largest_share(d, exact, error + unit * (exact.abs() + error + smallest))
