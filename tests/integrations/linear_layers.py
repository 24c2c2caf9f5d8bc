"""A small linear layer, and what it computes in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from linear_bounds import ACTIVATIONS

import warploom

Layer = warploom.nn.Linear
IN, OUT = 24, 16


def layer(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Layer:
    torch.manual_seed(0)
    return Layer(IN, OUT, dtype=dtype, **options)


def expected(
    module: torch.nn.Linear,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """The layer in float64, of its own rounded parameters."""
    bias = None if module.bias is None else module.bias.double()
    y = ACTIVATIONS[activation](F.linear(x.double(), module.weight.double(), bias))
    return y if residual is None else y + residual.double()
