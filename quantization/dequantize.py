"""What a packed weight stands for, as a weight of torch again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.errors import ProblemError
from warploom.quantization import slabs
from warploom.quantization.codes import numbers

if TYPE_CHECKING:
    from warploom.quantization.packed_weight import PackedWeight

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return W [N, K] of type `dtype`, on the weight's device.

    The product of a scale and a code is rounded to fp32, which is exact but for scales of fp32,
    and then to `dtype`; in float64 nothing is rounded.
    """
    if dtype not in TYPES:
        raise ProblemError(f"dtype {dtype}", rule=f"must be one of {', '.join(map(str, TYPES))}")
    made = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for first, end in slabs.row_ranges(weight.metadata):
        made[first:end] = rows(weight, first, end, dtype)
    return made


def rows(weight: PackedWeight, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return rows of W, of one of `row_ranges`, in fp32, in float64 where `dtype` is that."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    metadata = weight.metadata
    codes, scales, zeros = weight.rows(first, end)
    values = numbers(codes, metadata.slab.row, exact).reshape(end - first, metadata.groups, -1)
    if zeros is not None:
        values = values - zeros.to(exact)[..., None]
    values = (values * scales.to(exact)[..., None]).reshape(end - first, metadata.k)
    whole = weight.global_scale(first, end)
    return values if whole is None else values * whole
