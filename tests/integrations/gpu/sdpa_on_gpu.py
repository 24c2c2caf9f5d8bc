"""Attentions on the GPU: operands, torch's implementations, and whose kernels run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sdpa_bounds import draw
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import warploom

HALF, BF16 = torch.float16, torch.bfloat16
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
Tensors = tuple[torch.Tensor, ...]


@contextlib.contextmanager
def launching(expected: bool) -> Iterator[None]:
    """Assert that Warploom's kernels run inside of it, or that none does."""
    before = warploom.counters.launches
    yield
    assert (warploom.counters.launches > before) is expected


def by(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    """torch's function, which picks this implementation."""

    def attend(*given: torch.Tensor, **keywords: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*given, **keywords)

    return attend


def operands(
    heads: int, kv_heads: int, length: int, key_length: int, dim: int, dtype: torch.dtype = BF16
) -> Tensors:
    q = draw(2, heads, length, dim, dtype=dtype, device="cuda")
    k, v = (draw(2, kv_heads, key_length, dim, dtype=dtype, device="cuda", seed=i) for i in (1, 2))
    return q, k, v


def close(found: Tensors, wanted: Tensors) -> None:
    """Assert that tensors differ by no more than two roundings of bf16, over all."""
    for got, right in zip(found, wanted, strict=True):
        assert got.isfinite().all()
        assert (got.double() - right.double()).norm() <= 0.02 * right.double().norm()
