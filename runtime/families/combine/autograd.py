"""The gradients of both directions: each is computed by the other."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families.combine.call import CombineCall, PermuteCall
from warploom.runtime.function import Function

combine_rows = Function("combine", CombineCall)
permute_tokens = Function("permute", PermuteCall)


class CombineGradient(torch.autograd.Function):
    """The sum of rows, whose gradient is a weighted copy of a token's."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's)
        rows: torch.Tensor,
        inverse: torch.Tensor,
        weights: torch.Tensor | None,
        offsets: torch.Tensor | None,
        spec: KernelSpec | str | None,
    ) -> torch.Tensor:
        """Sum rows; keep them where weights want a gradient."""
        (combined,) = combine_rows(rows, inverse, weights, spec)
        wants_weights = ctx.needs_input_grad[2]
        ctx.save_for_backward(inverse, weights, offsets, rows if wants_weights else None)
        ctx.count = rows.shape[0]  # which may be more than the pairs, or fewer
        return combined

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 (torch's)
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of rows and of weights."""
        (gradient,) = gradients
        inverse, weights, offsets, rows = ctx.saved_tensors
        given = (gradient, inverse, weights, rows, offsets, None, ctx.count)
        found, of_weights = permute_tokens(*given)
        return found, None, of_weights, None, None


class PermuteGradient(torch.autograd.Function):
    """Copies of tokens, whose gradients are summed."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's)
        hidden: torch.Tensor,
        inverse: torch.Tensor,
        offsets: torch.Tensor | None,
        spec: KernelSpec | str | None,
    ) -> torch.Tensor:
        """Copy tokens."""
        rows, _ = permute_tokens(hidden, inverse, None, None, offsets, spec, None)
        ctx.save_for_backward(inverse)
        return rows

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 (torch's)
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradient of tokens."""
        (gradient,) = gradients
        (inverse,) = ctx.saved_tensors
        (found,) = combine_rows(gradient, inverse, None, None)
        return found, None, None, None
