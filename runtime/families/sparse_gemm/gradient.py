"""`sparse_gemm` as autograd sees it: differentiable once, in x and bias, but not in the weight.

The gradient of x is a GEMM by the weight with its zeros, torch's. Where there is an activation,
what it was applied to is computed again, and rounded to the type of y.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from warploom.generator.specification import KernelSpec
from warploom.quantization.sparse_weight import SparseWeight
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.sparse_gemm.call import OUTPUTS, SparseGemmCall
from warploom.runtime.function import Function
from warploom.runtime.tensors import refuse_transforms

without = Function("sparse_gemm", SparseGemmCall)
"""The function without gradients, whose arguments are those of `SparseGemmCall`, in order."""


def wanted(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether autograd wants gradients, and x and bias have types that can have them."""
    given = [one for one in (x, bias) if isinstance(one, torch.Tensor)]
    return any(one.requires_grad for one in given) and all(one.dtype in OUTPUTS for one in given)


def sparse_gemm(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    spec: KernelSpec | str | None,
) -> torch.Tensor:
    """Return y of 16 bits, differentiable in x and bias."""
    refuse_transforms("warploom.sparse_gemm")
    y: torch.Tensor = _SparseGemm.apply(x, values, metadata, bias, activation, spec)  # type: ignore[no-untyped-call]
    return y


class _SparseGemm(torch.autograd.Function):
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
        (y,) = without(*given, activation, None, spec, None, None, None)
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
            (z,) = without(*given)
            dz = cast("torch.Tensor", activation_backward(dy, z, ctx.activation)[0])
        of_x, _, _, of_bias, *_ = ctx.needs_input_grad
        dx = dbias = None
        if of_x:
            dx = dz.to(values.dtype) @ SparseWeight(values, metadata).dense()
        if of_bias:
            dbias = dz.float().reshape(-1, dz.shape[-1]).sum(0).to(bias.dtype)
        return dx, None, None, dbias, None, None
