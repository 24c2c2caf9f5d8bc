"""Products and epilogues to differentiate, and float64 autograd to hold their gradients against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import warploom
from warploom.runtime.families._product.reference import apply

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 6, 24, 16

Items = list[tuple[Any, ...]]


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def scales(*shape: int) -> torch.Tensor:
    return random(*shape, dtype=FP32, seed=3).abs() + 0.5


def leaves_of(a: torch.Tensor, b: torch.Tensor, items: Items) -> list[torch.Tensor]:
    return [a, b, *(item[1] for item in items if isinstance(item[1], torch.Tensor))]


def exact(
    a: torch.Tensor, b: torch.Tensor, items: Items, dd: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Float64 gradients of everything that items and operands read, of the same values."""
    a, b = leaf(a.detach().double()), leaf(b.detach().double())
    wide: Items = [
        (kind, leaf(x.detach().double()) if isinstance(x, torch.Tensor) else x, *rest)
        for kind, x, *rest in items
    ]
    d = apply(torch.matmul(a, b), wide)
    return torch.autograd.grad(
        d, leaves_of(a, b, wide), dd.double(), allow_unused=True, materialize_grads=True
    )


def held(
    found: torch.Tensor, expected: torch.Tensor, terms: int, what: str, least: float = 0.0
) -> None:
    """Every element within some roundings of 16 bits, of a sum of so many terms.

    A lost row, column, batch or scale is off by a multiple of the root mean square, which is at
    least `least`: that of a single sum says nothing of its terms, which may cancel.
    """
    assert found.shape == expected.shape, what
    unit = 2.0**-8 if found.dtype != FP16 else 2.0**-10
    spread = max(float(expected.square().mean().sqrt()), least) if expected.numel() else 0.0
    bound = 3 * unit * (expected.abs() + spread * (1 + terms**0.5 / 8))
    worst = ((found.double() - expected).abs() / (bound + 1e-30)).max() if found.numel() else 0
    assert worst <= 1, f"{what}: {worst:.2f} of its bound"


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    items: Items,
    *,
    keywords: dict[str, Any] | None = None,
    dd_of: Callable[[torch.Tensor], torch.Tensor] = lambda d: random(*d.shape, seed=9).to(d.dtype),
) -> tuple[torch.Tensor, ...]:
    d = warploom.gemm(a, b, epilogue=items, **(keywords or {}))
    given = leaves_of(a, b, items)
    wanted = [one for one in given if one.requires_grad]
    dd = dd_of(d)
    found = torch.autograd.grad(d, wanted, dd)
    expected = exact(a, b, items, dd)
    kept = [one for one, leaf in zip(expected, given, strict=True) if leaf.requires_grad]
    for one, leaf_, other in zip(found, wanted, kept, strict=True):
        assert one.dtype == leaf_.dtype
        least = float((d.detach().double() * dd.double()).norm()) if one.numel() == 1 else 0.0
        terms = max(d.numel() // max(one.numel(), 1), N)
        held(one, other, terms, str(list(one.shape)), least)
    return found


LAYOUTS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "row, col": lambda: (random(M, K), random(N, K).t()),
    "row, row": lambda: (random(M, K), random(K, N)),
    "col, col": lambda: (random(K, M).t(), random(N, K).t()),
    "col, row": lambda: (random(K, M).t(), random(K, N)),
    "slices": lambda: (random(M, 40)[:, 8:24], random(40, K)[8:32].t()),
    "rows of one matrix": lambda: (random(2, 3, K), random(N, K).t()),
    "batches": lambda: (random(3, M, K), random(3, N, K).mT),
    "batches, turned a": lambda: (random(3, K, M).mT, random(3, K, N)),
    "broadcast a": lambda: (random(M, K), random(3, N, K).mT),
    "broadcast b": lambda: (random(2, 3, M, K), random(3, K, N)),
    "one b of three dimensions": lambda: (random(3, M, K), random(1, N, K).mT),
    "b has more dimensions": lambda: (random(M, K), random(1, K, N)),
    "both broadcast": lambda: (random(2, 1, M, K), random(3, K, N)),
    "expanded": lambda: (random(1, M, K).expand(3, M, K), random(K, N)),
    "no rows": lambda: (random(0, K), random(N, K).t()),
    "no k": lambda: (random(M, 0), random(N, 0).t()),
    "no batches": lambda: (random(0, M, K), random(K, N)),
    "one row": lambda: (random(1, K), random(N, K).t()),
}


EPILOGUES: dict[str, Callable[[], Items]] = {
    "bias": lambda: [("bias", leaf(random(N)))],
    "bias [1, N]": lambda: [("bias", leaf(random(1, N, dtype=FP32)))],
    "scales": lambda: [
        ("scale_a", 0.5),
        ("scale_b", scales(1).reshape(())),
        ("bias", leaf(random(N, dtype=FP32))),
        ("residual", leaf(random(M, N)), 0.5),
        ("scale_d", scales(1)),
    ],
    "vectors": lambda: [
        ("scale_a", scales(M)),
        ("scale_b", scales(1, N)),
        ("bias", leaf(random(N))),
    ],
    "vectors behind the bias": lambda: [
        ("bias", leaf(random(N))),
        ("scale_row", scales(M)),
        ("scale_column", scales(N)),
    ],
    "many scales": lambda: [("scale", scales(1)) for _ in range(5)] + [("scale", 0.5)],
    "residual": lambda: [("residual", leaf(random(M, N)), 1.0)],
    "residual of no weight": lambda: [("residual", leaf(random(M, N)), 0.0)],
    "a layer": lambda: [
        ("scale_a", 2.0),
        ("bias", leaf(random(N))),
        ("activation", "gelu_tanh"),
        ("residual", leaf(random(M, N)), -0.5),
        ("scale_d", 0.25),
    ],
    "relu": lambda: [("activation", "relu")],
    "relu and scale": lambda: [("bias", leaf(random(N))), ("activation", "relu"), ("scale", -2.0)],
    "silu of vectors": lambda: [
        ("scale_a", scales(M)),
        ("scale_b", scales(N)),
        ("bias", leaf(random(N))),
        ("activation", "silu"),
    ],
    "gelu after a residual": lambda: [
        ("residual", leaf(random(M, N)), 0.5),
        ("bias", leaf(random(N))),
        ("activation", "gelu"),
    ],
    "two activations": lambda: [
        ("activation", "silu"),
        ("bias", leaf(random(N))),
        ("activation", "gelu"),
    ],
    "gradients of scales": lambda: [
        ("scale_a", leaf(scales(M))),
        ("scale_b", leaf(scales(N))),
        ("bias", leaf(random(N))),
        ("activation", "silu"),
        ("scale_d", leaf(scales(1))),
    ],
    "anything behind the activation": lambda: [
        ("activation", "silu"),
        ("bias", leaf(random(N))),
        ("scale_column", scales(N)),
    ],
}
