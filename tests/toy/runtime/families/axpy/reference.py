"""The same function in plain torch, and how far off a kernel may be."""

from __future__ import annotations

import torch

from warploom.runtime.elements import unit_roundoff


def axpy(x: torch.Tensor, y: torch.Tensor, alpha: float, *, relu: bool) -> torch.Tensor:
    """d = alpha x + y, in the precision of x."""
    found = alpha * x + y
    return found.relu() if relu else found


def bound(
    x: torch.Tensor, y: torch.Tensor, alpha: float, *, relu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """d in float64, and how far each element may be from it: fp32's roundings and the last one."""
    exact = axpy(x.double(), y.double(), alpha, relu=relu)
    sums = 2 * unit_roundoff(torch.float32) * ((alpha * x.double()).abs() + y.double().abs())
    smallest = torch.finfo(x.dtype).tiny
    return exact, sums + unit_roundoff(x.dtype) * (exact.abs() + sums + smallest)
