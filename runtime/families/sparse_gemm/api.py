"""Products with 2:4 sparse weights: the function that users call."""

from __future__ import annotations

import torch

from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.quantization.sparse_weight import SparseWeight
from warploom.runtime.families.sparse_gemm.call import SparseGemmCall
from warploom.runtime.function import Function
from warploom.runtime.tensors import shown

_sparse_gemm = Function("sparse_gemm", SparseGemmCall)


def sparse_gemm(
    x: torch.Tensor,
    weight: SparseWeight,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    out: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Multiply by a 2:4 sparse weight: return activation(x W' + bias).

    Args:
        x: [.., M, K] or [K], bf16 or fp16. Rows are read where they lie if TMA can read them: one
            pitch through all leading dimensions, a multiple of 16 bytes; else they are copied.
        weight: A `SparseWeight` [N, K] of the type of x, as `warploom.sparsify` makes it.
        bias: [N], contiguous, of the type of x.
        activation: relu, gelu, gelu_tanh or silu; None: none.
        out: Where the result goes, [.., M, N] of the type of x.
        spec: The kernel to run, or its name.

    Returns:
        y [.., M, N] of the type of x. Sums are fp32.

    Columns of x that a row of the weight has no value for are not read for it: infinities and NaN
    in them do not reach its result on a GPU. Runs on the current stream without waiting. On CPU
    tensors the reference computes the same, as a dense product.

    Raises:
        ProblemError: Before anything is launched; also for tensors that require grad.
    """
    (y,) = _sparse_gemm(x, *_tensors(weight), bias, activation, out, spec)
    return y


def _tensors(weight: SparseWeight) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(weight, SparseWeight):
        raise ProblemError(
            f"weight {shown(weight)} of type {type(weight).__name__}",
            rule="must be a SparseWeight",
            fix="make one of a weight with warploom.sparsify; warploom.gemm takes tensors",
        )
    return weight.values, weight.metadata
