"""The same functions in plain torch: what a call computes on CPU tensors.

`gemm` accumulates in fp32 (int8 in int64) and rounds once, like the kernels; `gemm_exact` and
`gemm_bound` are float64, for checking them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from warploom.runtime.epilogue import Item

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def apply(x: torch.Tensor, listed: Sequence[Item]) -> torch.Tensor:
    """Apply the epilogue's items to accumulators x [m, n], in x's own precision."""
    for item in listed:
        kind, value = item[0], item[1]
        if kind == "activation":
            x = _ACTIVATIONS[value](x)
            continue
        operand = value.to(x.dtype) if isinstance(value, torch.Tensor) else value
        if kind == "residual":
            x = x + item[2] * operand if item[2] != 0 else x
        elif kind == "bias":
            x = x + operand
        elif kind == "scale_row":
            x = x * operand.reshape(-1, 1)
        else:
            x = x * operand
    return x


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the output type; integers are exact already."""
    return x.to(dtype)


def gemm(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item], out_dtype: torch.dtype
) -> torch.Tensor:
    """Return epilogue(a b) [.., m, n]: fp32 accumulation, one rounding to `out_dtype`."""
    flat = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    integer = a.dtype == torch.int8
    wide = torch.int64 if integer else torch.float32
    x = flat.to(wide) @ b.to(wide)
    if out_dtype != torch.int32:
        x = apply(x.to(torch.float32), [_flat(item, x.shape) for item in listed])
    return round_to(x, out_dtype).reshape(*a.shape[:-1], b.shape[1])


def _flat(item: Item, shape: Sequence[int]) -> Item:
    if item[0] == "residual" and item[1].dim() > 2:
        return (item[0], item[1].reshape(shape), *item[2:])
    return item


def gemm_exact(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return epilogue(a b) in float64, and |a| |b|: what accumulation errors are relative to."""
    exact = a.double() @ b.double()
    return apply(exact, listed), a.double().abs() @ b.double().abs()


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the spacing of `dtype` above 1: the relative error of one rounding; 0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def accumulation(dtype: torch.dtype, k: int) -> float:
    """The error of a dot product of length k, relative to |a| |b|, on Hopper's tensor cores.

    16-bit types: products are exact, sums are truncated to about 22 bits each wgmma k. fp8 keeps
    about 13 bits. int8 is exact.
    """
    if dtype == torch.int8:
        return 0.0
    if dtype.itemsize == 1:
        return 2.0**-13 * math.ceil(max(k, 1) / 32)
    return 2.0**-22 * math.ceil(max(k, 1) / 16)
