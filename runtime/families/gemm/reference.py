"""The same functions in plain torch: what a call computes on CPU tensors.

`gemm` accumulates in fp32 (int8 in int64) and rounds once, like the kernels; `gemm_exact` and
`gemm_bound` are float64, for checking them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warploom.generator.families.gemm import Accumulation
from warploom.runtime.accumulation import accumulated
from warploom.runtime.families._product.reference import (
    apply,
    bound,
    product,
    rounded,
    write_outputs,
)
from warploom.runtime.families._product.steps.step import ROUNDOFF, Item
from warploom.runtime.families.gemm.block_scales import block_scales, dequantised
from warploom.runtime.measure import largest_share


def gemm(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item], out_dtype: torch.dtype
) -> torch.Tensor:
    """Return epilogue(a b) [.., m, n]: fp32 accumulation, one rounding to `out_dtype`.

    int8 accumulates in float64, which holds its sums exactly.
    """
    wide = torch.float64 if a.dtype == torch.int8 else torch.float32
    left, right, listed = operands(a, b, listed, wide)
    x = product(left, right)
    if listed:
        write_outputs(x.to(torch.float32), listed)
        x = apply(x.to(torch.float32), listed)
    return rounded(x, out_dtype, listed)


def operands(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, Sequence[Item]]:
    """Return a and b in `dtype`, times their block scales where they have some, and other items."""
    scaled = block_scales(a, b, listed)
    if scaled is None:
        return a.to(dtype), b.to(dtype), listed
    scale_a, scale_b = scaled
    right = dequantised(b.mT, scale_b, dtype).mT
    return dequantised(a, scale_a, dtype), right, listed[2:]


def gemm_exact(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return epilogue(a b) in float64, and |a| |b|: what accumulation errors are relative to."""
    left, right, listed = operands(a, b, listed, torch.float64)
    return apply(product(left, right), listed), product(left.abs(), right.abs())


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
    left, right, rest = operands(a, b, listed, torch.float64)
    x, magnitude = product(left, right), product(left.abs(), right.abs())
    if len(rest) < len(listed):  # sums over blocks of k are scaled where they are added
        error = (accumulated(a.dtype, a.shape[-1], "promoted") + 2 * ROUNDOFF) * magnitude
    else:
        error = accumulated(a.dtype, a.shape[-1], accumulation) * magnitude
    return bound(x, error, rest, out_dtype)


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
