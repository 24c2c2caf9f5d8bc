"""Gradients that are added up in `weight.main_grad`, an fp32 tensor, in place of weight.grad.

Training in 16 bits adds up micro-batches there; Megatron has the name for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from warploom.errors import ProblemError
from warploom.runtime.tensors import shown


def main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Where the gradient of a weight is added; None where none is wanted.

    Raises ProblemError where the weight has no such tensor.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    found: torch.Tensor | None = getattr(weight, "main_grad", None)
    if found is not None and (found.shape, found.dtype) == (weight.shape, torch.float32):
        return found
    raise ProblemError(
        f"main_grad {shown(found)} of a weight {list(weight.shape)}",
        rule="with accumulate_into_main_grad, it must be an fp32 tensor of the weight's shape",
        fix="set weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)",
    )


def accumulating(weight: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """The weight, for torch's operators: its gradient is added to `into` and goes no further."""
    found: torch.Tensor = _Accumulating.apply(weight, into)  # type: ignore[no-untyped-call]
    return found


class _Accumulating(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        weight: torch.Tensor,
        into: torch.Tensor,
    ) -> torch.Tensor:
        ctx.into = into
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        gradient: torch.Tensor,
    ) -> tuple[None, None]:
        """Add the gradient up."""
        ctx.into.add_(gradient)
        return None, None
