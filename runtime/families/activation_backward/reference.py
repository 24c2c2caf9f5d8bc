"""The same function in plain torch, and how far off a kernel may be."""

from __future__ import annotations

import math
from typing import cast

import torch

from warploom.generator.epilogue import Function
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._activation import gradient


def activation_backward(
    dy: torch.Tensor, z: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """dz in the precision of dy and z; dy itself without z."""
    return dy if z is None else dy * gradient.slope(cast("Function", activation), z)


def column_sums(dz: torch.Tensor) -> torch.Tensor:
    """The sums over all dimensions but the last; of none, 0."""
    return dz.reshape(dz.shape[:-1].numel(), dz.shape[-1]).sum(0)


def bounds(
    dy: torch.Tensor, z: torch.Tensor | None, activation: str | None, dz_dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """dz and the sums of its columns in float64, each with how far off a kernel's may be.

    dz has the error of f' and of two roundings. Of sums, the errors of m rows add up; fp32 rounds
    at each addition, with errors of either sign: of d that follow each other, sqrt(d) last.
    """
    wide, single = dy.double(), unit_roundoff(torch.float32)
    exact = activation_backward(wide, None if z is None else z.double(), activation)
    error = single * exact.abs()
    if z is not None and activation != "relu":  # whose derivative is exact where z is
        function, none = cast("Function", activation), torch.zeros((), device=z.device)
        error += wide.abs() * gradient.slope_error(function, z, none)
    info, last = torch.finfo(dz_dtype), unit_roundoff(dz_dtype)
    stored = error + last * (exact.abs() + error) + info.smallest_normal * info.eps
    depth = 2 * math.sqrt(dy.shape[:-1].numel()) + 64
    sums = column_sums(error) + depth * single * column_sums(exact.abs())
    return (exact, stored), (column_sums(exact), sums + torch.finfo(torch.float32).tiny)
