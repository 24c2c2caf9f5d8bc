"""Rows of experts as tokens and back again: the functions that users call."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families.combine.call import CombineCall, PermuteCall
from warploom.runtime.families.combine.checks import check_offsets
from warploom.runtime.function import Function
from warploom.runtime.tensors import refuse_transforms, require_one_device, require_tensors


def combine(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Sum the rows that experts computed for each token, each times its weight.

    `out[t] = sum over j of weights[t, j] * rows[inverse[t, j]]`, in the order of j, in fp32,
    rounded once: bits are the same in every run.

    Args:
        rows: What experts computed, fp16, bf16 or fp32 [rows, columns]. Columns are a multiple of
            8, and contiguous; rows may be any multiple of 16 bytes apart.
        inverse: The row of each pair of a token and an expert, int32 [tokens, k], as `route`
            returns it. A pair whose row is -1, or not among the rows, is left out. Of pairs that
            have one row, all count in the sum, and one in the gradient of the row.
        weights: Of the pairs, fp16, bf16 or fp32 [tokens, k], of any strides. None: each is 1.
        offsets: Of `route`, which do not decrease. With it, the gradient of rows that are no pair's
            is zeros; without it, that is undefined.
        spec: The kernel to run, or its name.

    Returns:
        [tokens, columns] of the type of rows. It is differentiable in rows and weights.

    Raises:
        ProblemError: Before anything is launched.

    Example:
        >>> rows = torch.arange(32.0).reshape(4, 8)
        >>> inverse = torch.tensor([[1, 0], [2, -1]], dtype=torch.int32)
        >>> warploom.combine(rows, inverse)[:, 0].tolist()
        [8.0, 16.0]
    """
    if offsets is not None:  # which only the gradient reads
        named = [("rows", rows), ("offsets", offsets)]
        if not torch.compiler.is_compiling():
            require_tensors("combine", named, ("rows", "offsets"))
        require_one_device(named)
        check_offsets(offsets)
    if torch.is_grad_enabled() and _any_requires_grad(rows, weights):
        refuse_transforms("combine")
        combined: torch.Tensor = CombineGradient.apply(rows, inverse, weights, offsets, spec)  # type: ignore[no-untyped-call]
        return combined
    (combined,) = combine_rows(rows, inverse, weights, spec)
    return combined


def permute(
    hidden: torch.Tensor,
    inverse: torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Copy each token to the rows of the experts that it chose: `out[inverse[t, j]] = hidden[t]`.

    Args:
        hidden: Tokens, fp16, bf16 or fp32 [tokens, columns]. Columns are a multiple of 8, and
            contiguous; tokens may be any multiple of 16 bytes apart.
        inverse: The row of each pair of a token and an expert, int32 [tokens, k], as `route`
            returns it. A pair whose row is -1 is left out.
        offsets: Of `route`, which do not decrease. With it, rows behind the last offset are zeros;
            without it, rows that are no pair's are undefined.
        spec: The kernel to run, or its name.

    Returns:
        [tokens * k, columns] of the type of hidden, in the order of experts. It is differentiable:
        the gradient of a token is the sum of its rows' in the order of its choices.

    Raises:
        ProblemError: Before anything is launched; for offsets that decrease where they are on the
            CPU.

    Example:
        >>> offsets, order, inverse = warploom.route(torch.tensor([[1], [0]]), 2)
        >>> hidden = torch.arange(16.0).reshape(2, 8)
        >>> warploom.permute(hidden, inverse, offsets=offsets)[:, 0].tolist()
        [8.0, 0.0]
    """
    if torch.is_grad_enabled() and _any_requires_grad(hidden):
        refuse_transforms("permute")
        permuted: torch.Tensor = PermuteGradient.apply(hidden, inverse, offsets, spec)  # type: ignore[no-untyped-call]
        return permuted
    rows, _ = permute_tokens(hidden, inverse, None, None, offsets, spec, None)
    return rows


def _any_requires_grad(*tensors: Any) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in tensors)


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
