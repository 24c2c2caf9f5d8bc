"""The derivatives of activations in plain torch; kernels have theirs in templates/_activation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from warploom.generator.epilogue import Function

_STEEPEST = {"gelu": 0.8, "gelu_tanh": 0.8, "silu": 0.5}  # the largest |f''|, which is that at 0
_SLOPE_ERROR = 2.0**-20  # of a kernel's derivative: mostly its fast exp's and its erfc's


def slope(function: Function, x: torch.Tensor) -> torch.Tensor:
    """The derivative at x, in x's precision; relu's is 0 at 0.

    NaN stays NaN. At infinity the derivative is 1, at minus infinity 0.
    """
    inside = x.nan_to_num(nan=0.0)  # whose infinities are the largest numbers
    found = torch.where(x.isinf(), (x > 0).to(x.dtype), _SLOPES[function](inside))
    return torch.where(x.isnan(), x, found)


def slope_error(function: Function, x: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """How far a kernel's derivative may be from that at x, its argument by `error` from x."""
    if function == "relu":
        return (x.abs() <= error).to(x.dtype)  # it may be on the other side of the step
    return _STEEPEST[function] * error + _SLOPE_ERROR


def _gelu(x: torch.Tensor) -> torch.Tensor:
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return torch.erfc(-x / math.sqrt(2)) / 2 + x * density


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    x = x.clamp(-100, 100)  # beyond, it is constant
    scale = 2 * math.sqrt(2 / math.pi)
    rise = scale * (1 + 3 * 0.044715 * x * x)
    return _times_logistic(x, scale * x * (1 + 0.044715 * x * x), rise)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return _times_logistic(x, x, 1.0)


def _times_logistic(
    x: torch.Tensor, inside: torch.Tensor, rise: torch.Tensor | float
) -> torch.Tensor:
    """The derivative of x / (1 + exp(-inside)), where `rise` is that of `inside`."""
    share = torch.sigmoid(inside)
    return share + x * share * torch.sigmoid(-inside) * rise


_SLOPES: dict[Function, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda x: (x > 0).to(x.dtype),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}
