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

_FLOAT_ROUNDOFF = 2.0**-24  # of one fp32 operation of the epilogue
_STEEPEST = 1.13  # the largest slope of an activation (gelu's)
_FUNCTION_ERROR = 2.0**-21  # of an activation, relative to its argument: mostly the fast exp's

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


def gemm(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item], out_dtype: torch.dtype
) -> torch.Tensor:
    """Return epilogue(a b) [.., m, n]: fp32 accumulation, one rounding to `out_dtype`.

    int8 accumulates in float64, which holds its sums exactly.
    """
    wide = torch.float64 if a.dtype == torch.int8 else torch.float32
    x = a.reshape(a.shape[:-1].numel(), a.shape[-1]).to(wide) @ b.to(wide)
    if listed:
        x = apply(x.to(torch.float32), listed)
    return x.to(out_dtype).reshape(*a.shape[:-1], b.shape[1])


def gemm_exact(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return epilogue(a b) in float64, and |a| |b|: what accumulation errors are relative to."""
    exact = a.double() @ b.double()
    return apply(exact, listed), a.double().abs() @ b.double().abs()


def gemm_bound(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item], out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return epilogue(a b) [m, n] in float64, and how far a kernel's D may be from each element.

    That is u |ref| + c |a| |b| for a plain product. Each step of the epilogue passes on the error
    that it is given and adds its own rounding in fp32.
    """
    x, magnitude = gemm_exact(a, b, ())
    error = accumulation(a.dtype, a.shape[-1]) * magnitude
    if out_dtype != torch.int32:
        error += _FLOAT_ROUNDOFF * x.abs()  # int32 accumulators become fp32
    for item in listed:
        before, x = x, apply(x, [item])
        error = _passed_on(item, before, x, error)
    unit = unit_roundoff(out_dtype)
    smallest = torch.finfo(out_dtype).tiny if unit else 0.0  # below it, spacing is constant
    return x, error + unit * (x.abs() + error + smallest)


def _passed_on(
    item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
) -> torch.Tensor:
    if item[0] == "activation":
        # Far from 0 the functions are 0 or x itself; near it, their factor of x cancels.
        own = 0.0 if item[1] == "relu" else _FUNCTION_ERROR
        return _STEEPEST * error + own * (after.abs() + before.abs().clamp(max=8))
    if item[0] in ("bias", "residual"):
        return error + _FLOAT_ROUNDOFF * (after.abs() + (after - before).abs())
    return apply(error, [item]).abs() + 2 * _FLOAT_ROUNDOFF * after.abs()


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
