"""The same function in plain torch: what a call computes on CPU tensors, and how far kernels may be
off.

A kernel scales sums of a group, or it scales weights, which are then rounded to the type of A, and
so are scales of another type before. Each way has its own exact result, with a bound that a lost
k step breaks; the roundings of weights alone would allow more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from warploom.quantization import PackedWeight, slabs
from warploom.quantization.codes import numbers
from warploom.runtime.accumulation import accumulated
from warploom.runtime.families._product import reference
from warploom.runtime.families._product.steps.step import ROUNDOFF, Item
from warploom.runtime.measure import largest_share

Scaled = Literal["sums", "weights"]

PROMOTED = 128  # of k: sums of activations of 8 bits that have no scales of groups
ADDED = 64  # sums of who shares k, at most, and roundings around them


def mixed_gemm(
    a: torch.Tensor, weight: PackedWeight, listed: Sequence[Item], out_dtype: torch.dtype
) -> torch.Tensor:
    """Return epilogue(a w') [.., m, n]: float64 sums, fp32 steps, one rounding to `out_dtype`."""
    x = product(a.double(), weight).to(torch.float32)
    reference.write_outputs(x, listed)
    return reference.rounded(reference.apply(x, listed), out_dtype, listed)


def product(
    a: torch.Tensor, weight: PackedWeight, *, rounded: torch.dtype | None = None, size: bool = False
) -> torch.Tensor:
    """Return a w' [.., m, n] of a in float64; |a| |w|' where the `size` is wanted.

    Weights are exact, or `rounded` to a type as kernels do that scale them.
    """
    a = a.abs() if size else a
    found = [a @ (w.abs() if size else w).mT for w in _rows(weight, rounded)]
    return torch.cat(found, -1)


def _rows(weight: PackedWeight, dtype: torch.dtype | None) -> Iterator[torch.Tensor]:
    """Ranges of rows of W in float64, of which few take little memory."""
    row = weight.metadata.slab.row
    for first, end in slabs.row_ranges(weight.metadata):
        codes, scales, zeros = weight.rows(first, end)
        values = numbers(codes, row, torch.float64)
        values = values.reshape(end - first, weight.metadata.groups, -1)
        if zeros is not None:
            values = values - zeros.double()[..., None]
        if dtype is None:
            values = values * scales.double()[..., None]
        else:
            values = (values * scales.double().to(dtype).double()[..., None]).to(dtype).double()
        values = values.reshape(end - first, weight.metadata.k)
        whole = weight.global_scale(first, end)
        yield values if whole is None else values * whole.double()


def ways(a: torch.dtype, weight: PackedWeight) -> tuple[Scaled, ...]:
    """What kernels may scale: of 8-bit activations, and per channel, only sums."""
    if a.itemsize == 1 or weight.metadata.group is None:
        return ("sums",)
    # Powers of two round no weight; a sum that they scale has groups of 32.
    return ("sums", "weights")


def bound(
    a: torch.Tensor,
    weight: PackedWeight,
    listed: Sequence[Item],
    out_dtype: torch.dtype,
    scaled: Scaled = "sums",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return epilogue(a w') in float64, and how far a kernel's D may be from each element."""
    wide, k, group = a.double(), a.shape[-1], weight.metadata.group
    size = product(wide, weight, size=True)
    if scaled == "weights":
        x = product(wide, weight, rounded=a.dtype)
        error = (accumulated(a.dtype, k) + ADDED * ROUNDOFF) * size
    else:
        x = product(wide, weight)
        depth = min(k, group or (PROMOTED if a.dtype.itemsize == 1 else k))
        sums = -(-k // depth)  # that are scaled, and added in fp32
        error = (accumulated(a.dtype, depth) + (sums + ADDED) * ROUNDOFF) * size
    return reference.bound(x, error, listed, out_dtype)


def error_share(
    d: torch.Tensor, a: torch.Tensor, weight: PackedWeight, listed: Sequence[Item] = ()
) -> float:
    """Return the largest error of d = epilogue(a w'), each as a share of its own bound.

    A share above 1, infinity for a NaN that should not be, is a wrong result. Which way a kernel
    scales need not be known: a result is right that is so in one of them throughout.
    """
    return min(
        largest_share(d, *bound(a, weight, listed, d.dtype, way)) for way in ways(a.dtype, weight)
    )
