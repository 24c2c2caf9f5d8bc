"""A linear layer and its gradients in float64, each with the magnitude of what it adds up."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import warploom

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
Exact = tuple[torch.Tensor, torch.Tensor]  # a gradient, and the sum of its terms' magnitudes


def differentiated(
    module: warploom.nn.Linear,
    x: torch.Tensor,
    residual: torch.Tensor,
    dy: torch.Tensor,
) -> tuple[Exact, Exact, Exact, Exact]:
    """The gradients of x, residual, weight and bias."""
    given, weight = (tensor.detach().double() for tensor in (x, module.weight))
    z = F.linear(given, weight, module.bias.detach().double()).requires_grad_()
    (dz,) = torch.autograd.grad(ACTIVATIONS[module.activation](z), z, dy.double())
    most = dy.double().abs()  # slopes are up to 1.13, of arguments that are rounded too
    rows, columns = dz.reshape(-1, dz.shape[-1]), given.reshape(-1, given.shape[-1])
    return (
        (dz @ weight, most @ weight.abs()),
        (dy.double(), most),
        (rows.t() @ columns, most.reshape(rows.shape).t() @ columns.abs()),
        (rows.sum(0), most.reshape(rows.shape).sum(0)),
    )


def within(
    found: torch.Tensor | None, exact: torch.Tensor, magnitude: torch.Tensor, unit: float = 2**-7
) -> bool:
    """Whether each element is as near as sums of terms that were rounded to bf16 can be."""
    assert found is not None
    return bool(((found.double() - exact).abs() <= unit * magnitude + 1e-6).all())
