"""What comes before and after a product's sums in plain torch, and how far off kernels may be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warploom.generator.epilogue import StochasticRounding
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.step import ROUNDOFF, Item


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a b [.., m, n]; of one b, all rows of a are one product."""
    if b.dim() > 2:
        return a @ b
    rows = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    return (rows @ b).reshape(*a.shape[:-1], b.shape[-1])


def apply(x: torch.Tensor, listed: Sequence[Item]) -> torch.Tensor:
    """Apply the epilogue's items to accumulators x [.., m, n], in x's own precision."""
    for item in listed:
        x = step_of(item).apply(x, item)
    return x


def write_outputs(x: torch.Tensor, listed: Sequence[Item]) -> None:
    """Fill the outputs that steps have of their own, of accumulators x [.., m, n]."""
    for index, item in enumerate(listed):
        one = step_of(item)
        if one.step.auxiliary:
            one.write(apply(x, listed[:index]), item)


def rounded(x: torch.Tensor, dtype: torch.dtype, listed: Sequence[Item] = ()) -> torch.Tensor:
    """Round as the kernels do: 8-bit types saturate; NaN is kept, in int8 is 0.

    To nearest even, unless the items end with a rounding of their own.
    """
    if listed:
        x = step_of(listed[-1]).rounded(x, listed[-1], dtype)
    if dtype == torch.int8:
        return x.nan_to_num(nan=0.0).round().clamp(-128, 127).to(dtype)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return x.clamp(-limit, limit).to(torch.float32).to(dtype)
    return x.to(dtype)


def bound(
    x: torch.Tensor, error: torch.Tensor, listed: Sequence[Item], out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return epilogue(x) in float64, and how far a kernel's D may be from each element.

    Its sums may be `error` from x. Each step passes on the error that it is given and adds its own
    rounding in fp32.
    """
    if out_dtype != torch.int32:
        error = error + ROUNDOFF * x.abs()  # int32 accumulators become fp32
    for item in listed:
        one, before = step_of(item), x
        x = one.apply(before, item)
        error = one.error(item, before, x, error)
    if out_dtype == torch.int8:
        return x.nan_to_num(nan=0.0).clamp(-128, 127), error + 0.5
    unit = unit_roundoff(out_dtype)
    if listed and step_of(listed[-1]).step is StochasticRounding:
        unit *= 2  # either neighbour
    smallest = torch.finfo(out_dtype).tiny if unit else 0.0  # below it, spacing is constant
    if out_dtype.itemsize == 1:
        x = x.clamp(-torch.finfo(out_dtype).max, torch.finfo(out_dtype).max)
    return x, error + unit * (x.abs() + error + smallest)
