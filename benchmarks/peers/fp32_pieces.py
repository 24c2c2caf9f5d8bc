"""fp32 GEMMs by 16-bit pieces, splits counted, compared with torch's fp32 and TF32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.gemm.api import gemm

Operands = tuple[torch.Tensor, torch.Tensor]  # a, and a weight [N, K]
BOUND = {"fp32": 2.0**-19, "bf16x3": 2.0**-14, "bf16x6": 2.0**-19, "tf32": 2.0**-10}
"""Of |A||B|, that an element may be off."""


def cases(_asked: Asked) -> Iterator[Case]:
    """Each listed product, by fp32 weights that are kept as pieces, and by those that are not."""
    for m, n, k in cells()["fp32_pieces"]["products"]:
        floor = Floor.of(2 * 3 * m * n * k, 4 * (m * k + n * k + m * n))
        about = {"m": m, "n": n, "k": k, "type": "fp32"}
        yield Case(f"{m}x{n}x{k}", about, floor, partial(contenders, m, n, k))


def contenders(m: int, n: int, k: int, asked: Asked) -> list[Contender]:
    """Warploom by each precision, and torch by fp32 and TF32."""

    def draw() -> Operands:
        return torch.randn(m, k, device=asked.device), torch.randn(n, k, device=asked.device)

    given: Sequence[Operands] = rotated(draw, 4 * (m * k + n * k + m * n), asked.device)
    kept = [(a, torch.nn.Parameter(weight)) for a, weight in given]
    found = [
        _contender("warploom", "fp32", given, partial(_by_pieces, "fp32")),
        _contender("warploom, weight kept", "fp32", kept, partial(_by_pieces, "fp32")),
        _contender("warploom bf16x6", "bf16x6", given, partial(_by_pieces, "bf16x6")),
        _contender("warploom bf16x3", "bf16x3", given, partial(_by_pieces, "bf16x3")),
        _contender("warploom TF32", "tf32", given, partial(_by_pieces, "tf32")),
    ]
    if not asked.peers or "torch" in asked.peers:
        by_torch = partial(_by_torch, False)
        found.insert(1, _contender("torch.mm fp32 (cuBLAS)", "fp32", given, by_torch, peer=True))
        found.append(_contender("torch.mm TF32 (cuBLAS)", "tf32", given, partial(_by_torch, True)))
    return found


def _by_pieces(precision: str, a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return gemm(a, weight.t(), precision=precision)


def _by_torch(is_tf32: bool, a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = is_tf32
    try:
        return torch.mm(a, weight.t())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _contender(
    name: str,
    precision: str,
    given: Sequence[Any],
    run: Callable[..., torch.Tensor],
    *,
    peer: bool = False,
) -> Contender:
    calls = [partial(run, *one) for one in given]
    return Contender(name, calls, lambda: _wrong(precision, given[0], calls[0]()), peer=peer)


def _wrong(precision: str, given: Operands, d: torch.Tensor) -> float:
    """The largest error of some rows as a share of their bound."""
    a, weight = given[0][:64].double(), given[1].detach().double().t()
    share = (d[:64] - a @ weight).abs() / (a.abs() @ weight.abs())
    return float(share.max()) / BOUND[precision]


class Fp32Products(Family):
    """fp32 GEMMs."""

    def subject(self, problem: Problem) -> str:
        """The weight."""
        return f"{problem['n']}x{problem['k']}"

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By the weight, then m."""
        return problem["n"] * problem["k"], problem["n"], problem["m"]

    def flops(self, problem: Problem) -> float:
        """The operations of the fp32 product."""
        return float(2 * problem["m"] * problem["n"] * problem["k"])


FAMILY = Fp32Products(
    name="fp32_pieces",
    groups={"fp32": Group("{kind}", cases, "{kind}")},
    grid=("fp32",),
    kinds={"fp32": "fp32 GEMMs by 16-bit pieces"},
    peers={"torch": "torch.mm fp32 (cuBLAS)"},
    axis=("M", "M, rows"),
)
