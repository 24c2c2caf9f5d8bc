"""What users call, `warploom.sparse_gemm`; autograd may differentiate it, in x and bias.

The gradient of x is a GEMM by the weight with its zeros, torch's. Where there is an activation,
what it was applied to is computed again, and rounded to the type of y.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.quantization.sparse_weight import SparseWeight
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.sparse_gemm.call import OUTPUTS, SparseGemmCall
from warploom.runtime.function import Function
from warploom.runtime.tensors import refuse_transforms, shown

_sparse_gemm = Function("sparse_gemm", SparseGemmCall)


def sparse_gemm(
    x: torch.Tensor,
    weight: SparseWeight,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    scale_x: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Multiply by a 2:4 sparse weight: return activation(scale_x scale_weight (x W') + bias).

    Args:
        x: [.., M, K] or [K], bf16, fp16, e4m3 or int8. Rows are read in place if TMA can read them:
            one row stride through all leading dimensions, a multiple of 16 bytes; else they are
            copied.
        weight: A `SparseWeight` [N, K] of the type of x, as `warploom.sparsify` makes it.
        bias: [N], contiguous, of the type of the result.
        activation: relu, gelu, gelu_tanh or silu; None: none.
        scale_x: fp32, one element or one for each row of x; only of 8 bits, and together with:
        scale_weight: fp32, one element or one for each row of the weight.
        out_dtype: bf16 or fp16, the type of the result. By default that of x, or of `out`; for x of
            8 bits bf16.
        out: Where the result goes, [.., M, N].
        spec: The kernel to run, or its name.

    Returns:
        y [.., M, N]. Accumulators are fp32, those of int8 int32.

    The result is differentiable, once, in x and bias of 16 bits, but not in the weight and not with
    `out`. Columns of x that a row of the weight has no value for are not read for it: infinities
    and NaN in them do not reach its result on a GPU. Runs on the current stream without waiting. On
    CPU tensors the reference computes the same, as a dense GEMM.

    Raises:
        ProblemError: Before anything is launched.

    Example:
        >>> weight = warploom.sparsify(torch.randn(384, 256).bfloat16())
        >>> warploom.sparse_gemm(torch.randn(8, 256).bfloat16(), weight).shape
        torch.Size([8, 384])
    """
    values, metadata = _tensors(weight)
    if out is None and torch.is_grad_enabled() and _differentiated(x, bias):
        refuse_transforms("warploom.sparse_gemm")
        y: torch.Tensor = _SparseGemm.apply(x, values, metadata, bias, activation, spec)  # type: ignore[no-untyped-call]
        return y
    rest = bias, activation, out, spec, scale_x, scale_weight, out_dtype
    (y,) = _sparse_gemm(x, values, metadata, *rest)
    return y


def _tensors(weight: SparseWeight) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(weight, SparseWeight):
        raise ProblemError(
            f"weight {shown(weight)} of type {type(weight).__name__}",
            rule="must be a SparseWeight",
            fix="make one of a weight with warploom.sparsify; warploom.gemm takes tensors",
        )
    return weight.values, weight.metadata


def _differentiated(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether autograd wants gradients, and x and bias have types that can have them."""
    given = [one for one in (x, bias) if isinstance(one, torch.Tensor)]
    return any(one.requires_grad for one in given) and all(one.dtype in OUTPUTS for one in given)


class _SparseGemm(torch.autograd.Function):
    """y of 16 bits."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor,
        values: torch.Tensor,
        metadata: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        spec: KernelSpec | str | None,
    ) -> torch.Tensor:
        given = [None if one is None else one.detach() for one in (x, values, metadata, bias)]
        (y,) = _sparse_gemm(*given, activation, None, spec, None, None, None)
        ctx.activation = activation
        recomputed = activation is not None
        ctx.save_for_backward(values, metadata, bias, x if recomputed else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        values, metadata, bias, x = ctx.saved_tensors
        dz = dy
        if x is not None:
            given = (x.detach(), values, metadata, bias, *[None] * 6)
            (z,) = _sparse_gemm(*given)
            dz = cast("torch.Tensor", activation_backward(dy, z, ctx.activation)[0])
        of_x, _, _, of_bias, *_ = ctx.needs_input_grad
        dx = dbias = None
        if of_x:
            dx = dz.to(values.dtype) @ SparseWeight(values, metadata).dense()
        if of_bias:
            dbias = dz.float().reshape(-1, dz.shape[-1]).sum(0).to(bias.dtype)
        return dx, None, None, dbias, None, None
