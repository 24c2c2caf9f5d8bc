"""The same product in plain torch, and how far off a kernel may be."""

from __future__ import annotations

import torch

from warploom.quantization.sparse_weight import SparseWeight
from warploom.runtime.accumulation import accumulated
from warploom.runtime.families._product import reference
from warploom.runtime.families._product.reference import apply, product
from warploom.runtime.families._product.steps.step import Item


def items(bias: torch.Tensor | None, activation: str | None) -> list[Item]:
    """The bias and the activation as items of an epilogue."""
    listed: list[Item] = [] if bias is None else [("bias", bias)]
    return listed if activation is None else [*listed, ("activation", activation)]


def sparse_gemm(
    x: torch.Tensor, weight: SparseWeight, listed: list[Item], dtype: torch.dtype
) -> torch.Tensor:
    """y in `dtype`, of which sums are too: zeros of the weight are multiplied as well."""
    return apply(product(x.to(dtype), weight.dense().to(dtype).mT), listed)


def bound(
    x: torch.Tensor, weight: SparseWeight, listed: list[Item], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """y in float64, and how far each element of a kernel's may be from it."""
    left, right = x.double(), weight.dense().double().mT
    error = accumulated(x.dtype, x.shape[-1], "fast") * product(left.abs(), right.abs())
    return reference.bound(product(left, right), error, listed, dtype)
