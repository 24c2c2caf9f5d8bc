"""The same GEMM in plain torch, and how far off a kernel may be."""

from __future__ import annotations

import torch

from warploom.quantization.sparse_weight import SparseWeight
from warploom.runtime.accumulation import accumulated
from warploom.runtime.families._product import reference
from warploom.runtime.families._product.reference import apply
from warploom.runtime.families._product.steps.step import Item


def items(
    bias: torch.Tensor | None,
    activation: str | None,
    scale_x: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
) -> list[Item]:
    """The scales, the bias and the activation as items of an epilogue, for x as a matrix."""
    scales = (("scale_a", scale_x), ("scale_b", scale_weight))
    listed: list[Item] = [(kind, one.reshape(-1)) for kind, one in scales if one is not None]
    listed += [] if bias is None else [("bias", bias)]
    return listed if activation is None else [*listed, ("activation", activation)]


def sparse_gemm(
    x: torch.Tensor, weight: SparseWeight, listed: list[Item], dtype: torch.dtype
) -> torch.Tensor:
    """y [M, N] in `dtype`, of which sums are too: zeros of the weight are multiplied as well."""
    return apply(_rows(x).to(dtype) @ weight.dense().to(dtype).mT, listed)


def bound(
    x: torch.Tensor, weight: SparseWeight, listed: list[Item], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [.., M, N] in float64, and how far each element of a kernel's may be from it."""
    left, right = _rows(x).double(), weight.dense().double().mT
    error = accumulated(x.dtype, x.shape[-1], "fast") * (left.abs() @ right.abs())
    exact, far = reference.bound(left @ right, error, listed, dtype)
    shape = (*x.shape[:-1], right.shape[1])
    return exact.reshape(shape), far.reshape(shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
