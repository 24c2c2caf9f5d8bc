"""GEMMs with 2:4 sparse weights: the function that users call."""

from __future__ import annotations

import torch

from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.quantization.sparse_weight import SparseWeight
from warploom.runtime.families.sparse_gemm import gradient
from warploom.runtime.tensors import shown


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
    CPU tensors the reference computes the same, as a dense product.

    Raises:
        ProblemError: Before anything is launched.

    Example:
        >>> weight = warploom.sparsify(torch.randn(384, 256).bfloat16())
        >>> warploom.sparse_gemm(torch.randn(8, 256).bfloat16(), weight).shape
        torch.Size([8, 384])
    """
    values, metadata = _tensors(weight)
    if out is None and torch.is_grad_enabled() and gradient.wanted(x, bias):
        return gradient.sparse_gemm(x, values, metadata, bias, activation, spec)
    rest = bias, activation, out, spec, scale_x, scale_weight, out_dtype
    (y,) = gradient.without(x, values, metadata, *rest)
    return y


def _tensors(weight: SparseWeight) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(weight, SparseWeight):
        raise ProblemError(
            f"weight {shown(weight)} of type {type(weight).__name__}",
            rule="must be a SparseWeight",
            fix="make one of a weight with warploom.sparsify; warploom.gemm takes tensors",
        )
    return weight.values, weight.metadata
