"""Experts that train in fp8, one by one in fp64, of operands that are quantized one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch

import warploom
from warploom.runtime.families.gemm.block_scales import dequantised

E4M3 = torch.float8_e4m3fn


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """x in e4m3 by blocks of 1x128 along its rows, in fp64."""
    values, scale = warploom.cast(x.contiguous(), E4M3, block=(1, 128), pow2=True)
    return dequantised(values, scale, torch.float64)


def by_blocks(weight: torch.Tensor) -> torch.Tensor:
    """A matrix in e4m3 by blocks of 128x128, in fp64."""
    values, scale = warploom.cast(weight.contiguous(), E4M3, block=(128, 128), pow2=True)
    return dequantised(values, scale, torch.float64)


def ranges(offsets: torch.Tensor) -> list[tuple[int, int]]:
    """Where the rows of experts begin and end."""
    ends: list[int] = offsets.tolist()
    return list(zip([0, *ends], ends, strict=False))


def linear(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, dy: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """y [s, n], dx [s, k] and dW [E, n, k] of weights [E, n, k]; and what their sums' magnitudes
    are, which bound how far off accumulators are. Rows of no expert are zeros.
    """
    shapes = (*dy.shape,), (*rows.shape,), (*weight.shape,)
    found = [[torch.zeros(shape, dtype=torch.float64) for _ in range(2)] for shape in shapes]
    keep: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda one: one, torch.abs]
    for expert, (begin, end) in enumerate(ranges(offsets)):
        if begin == end:
            continue
        w = by_blocks(weight[expert])
        x, d = (by_rows(one[begin:end]) for one in (rows, dy))
        x_t, d_t = (by_rows(one[begin:end].t()) for one in (rows, dy))
        for place, of in enumerate(keep):
            found[0][place][begin:end] = of(x) @ of(w).T
            found[1][place][begin:end] = of(d) @ of(w)
            found[2][place][expert] = of(d_t) @ of(x_t).T
    return tuple((exact, magnitude) for exact, magnitude in found)


TENSOR_CORE = 2.0**-9
"""What sums of e4m3 may lose on a GPU, of their magnitudes: 2^-13 of the largest of 32 products for
each of them. Columns that differ in scale as those of the tests lost 7 x 2^-13, and 8 x 2^-13 in a
simulation.
"""


def share(
    found: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, lost: float = 2.0**-13
) -> float:
    """The largest error, as a share of a rounding of the result and of what accumulators lose."""
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
    least = torch.finfo(found.dtype).smallest_normal * step[found.dtype]
    bound = step[found.dtype] * exact.abs() + lost * magnitude + least
    return float(((found.detach().double() - exact).abs() / bound).max())
