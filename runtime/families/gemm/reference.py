"""The same functions in plain torch: what a call computes on CPU tensors.

`gemm` accumulates in fp32 (int8 in int64) and rounds once, like the kernels; `gemm_exact` and
`gemm_bound` are float64, for checking them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from warploom.generator.families.gemm import Accumulation
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families.gemm.steps import step_of
from warploom.runtime.families.gemm.steps.step import ROUNDOFF, Item
from warploom.runtime.measure import largest_share


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


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest even as the kernels do: 8-bit types saturate; NaN is kept, in int8 is 0."""
    if dtype == torch.int8:
        return x.nan_to_num(nan=0.0).round().clamp(-128, 127).to(dtype)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return x.clamp(-limit, limit).to(torch.float32).to(dtype)
    return x.to(dtype)


def gemm(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item], out_dtype: torch.dtype
) -> torch.Tensor:
    """Return epilogue(a b) [.., m, n]: fp32 accumulation, one rounding to `out_dtype`.

    int8 accumulates in float64, which holds its sums exactly.
    """
    wide = torch.float64 if a.dtype == torch.int8 else torch.float32
    x = product(a.to(wide), b.to(wide))
    if listed:
        write_outputs(x.to(torch.float32), listed)
        x = apply(x.to(torch.float32), listed)
    return rounded(x, out_dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a b [.., m, n]; of one b, all rows of a are one product."""
    if b.dim() > 2:
        return a @ b
    rows = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    return (rows @ b).reshape(*a.shape[:-1], b.shape[-1])


def gemm_exact(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return epilogue(a b) in float64, and |a| |b|: what accumulation errors are relative to."""
    exact = product(a.double(), b.double())
    return apply(exact, listed), product(a.double().abs(), b.double().abs())


def gemm_bound(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out_dtype: torch.dtype,
    accumulation: Accumulation = "fast",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return epilogue(a b) in float64, and how far a kernel's D may be from each element.

    That is u |ref| + c |a| |b| for a plain product. Each step of the epilogue passes on the error
    that it is given and adds its own rounding in fp32.
    """
    x, magnitude = gemm_exact(a, b, ())
    error = accumulated(a.dtype, a.shape[-1], accumulation) * magnitude
    if out_dtype != torch.int32:
        error += ROUNDOFF * x.abs()  # int32 accumulators become fp32
    for item in listed:
        one, before = step_of(item), x
        x = one.apply(before, item)
        error = one.error(item, before, x, error)
    if out_dtype == torch.int8:
        return x.nan_to_num(nan=0.0).clamp(-128, 127), error + 0.5
    unit = unit_roundoff(out_dtype)
    smallest = torch.finfo(out_dtype).tiny if unit else 0.0  # below it, spacing is constant
    if out_dtype.itemsize == 1:
        x = x.clamp(-torch.finfo(out_dtype).max, torch.finfo(out_dtype).max)
    return x, error + unit * (x.abs() + error + smallest)


def error_share(
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item] = (),
    accumulation: Accumulation = "fast",
) -> float:
    """Return the largest error of d = epilogue(a b) [m, n], each as a share of its own bound.

    A share above 1, infinity for a NaN that should not be, is a wrong result. The bound is that of
    the accumulation that was asked for: promoted sums may err less than fast ones.
    """
    return largest_share(d, *gemm_bound(a, b, listed, d.dtype, accumulation))


def accumulated(dtype: torch.dtype, k: int, accumulation: Accumulation = "fast") -> float:
    """The error of a dot product of length k, relative to |a| |b|, on Hopper's tensor cores.

    16-bit types: products are exact, sums are truncated to about 22 bits each wgmma k. fp8 keeps
    about 13 bits of the largest product in each wgmma k, and of the sum before it; promoted, it
    does so for sums over 128, and fp32 for the rest. int8 is exact.
    """
    if dtype == torch.int8:
        return 0.0
    if dtype.itemsize == 1 and accumulation == "promoted":
        return accumulated(dtype, min(k, 128)) + 2.0**-24 * math.ceil(k / 128)
    if dtype.itemsize == 1:
        return 2.0**-13 * (1 + math.ceil(max(k, 1) / 32))
    return 2.0**-22 * math.ceil(max(k, 1) / 16)
