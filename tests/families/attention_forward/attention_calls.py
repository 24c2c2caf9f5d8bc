"""Calls of attention on the CPU: operands, results by the documentation, recorded launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import warploom

BF16, FP16 = torch.bfloat16, torch.float16
INF = torch.inf


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def operands(
    seq_q: int, seq_k: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 40, batch: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (batch, kv_heads, seq_k, dim)
    return random(batch, heads, seq_q, dim), random(*shape, seed=1), random(*shape, seed=2)


def leaves(seq: int = 14) -> list[torch.Tensor]:
    """Fresh leaves q, k and v: four query heads over two."""
    heads = (4, 2, 2)
    return [random(2, n, seq, 40, seed=i).requires_grad_() for i, n in enumerate(heads)]


def causal(*given: torch.Tensor, **keywords: Any) -> torch.Tensor:
    result: torch.Tensor = warploom.attention(*given, causal=True, **keywords)  # type: ignore[call-overload]
    return result


def gradients(given: list[torch.Tensor], **keywords: Any) -> tuple[torch.Tensor, ...]:
    out = causal(*given, **keywords)
    return torch.autograd.grad(out, given, random(*out.shape, seed=7))


def shown(row: int, column: int, seq_q: int, seq_k: int, keywords: dict[str, Any]) -> bool:
    """Whether a row attends to a column, straight from the words of the documentation."""
    causal = keywords.get("causal", False)
    left, right = keywords.get("window") or (None, None)
    diagonal = row if causal == "top_left" else row + seq_k - seq_q
    return (
        (not causal or column <= diagonal)
        and (left is None or column >= diagonal - left)
        and (right is None or column <= diagonal + right)
    )


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse in float64, row by row."""
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:-1], -INF, dtype=torch.float64)
    for row in range(seq_q):
        columns = [c for c in range(seq_k) if shown(row, c, seq_q, seq_k, keywords)]
        for one in range(batch):
            for head in range(heads):
                if not columns:
                    continue
                shared = head // (heads // kv_heads)
                keys, values = k[one, shared, columns].double(), v[one, shared, columns].double()
                s = keys @ q[one, head, row].double() * keywords.get("scale", dim**-0.5)
                if cap := keywords.get("softcap"):
                    s = cap * torch.tanh(s / cap)
                lse[one, head, row] = s.logsumexp(0)
                out[one, head, row] = torch.softmax(s, 0) @ values
    return out, lse


def assert_right(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any
) -> torch.Tensor:
    out, lse = warploom.attention(q, k, v, return_lse=True, **keywords)
    wanted, wanted_lse = expected(q, k, v, keywords)
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    unit = torch.finfo(q.dtype).eps / 2
    assert ((out.double() - wanted).abs() <= unit * wanted.abs() + 1e-5).all()
    assert torch.allclose(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    return out


class Recorder:
    """Stands in for the launches of a plan, and keeps what they are given."""

    def __init__(self) -> None:
        self.given: list[tuple[tuple[int, ...], tuple[float, ...]]] = []

    def run(
        self,
        addresses: tuple[int, ...],
        scalars: tuple[float, ...],
        check: Callable[..., None],
        *given: object,
    ) -> tuple[()]:
        check(*given)
        self.given.append((addresses, scalars))
        return ()
