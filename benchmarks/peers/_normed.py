"""An RMS norm between two linear layers, through their epilogues and as a kernel of its own.

A cell is x = x + h O^T; y = norm(x) W^T, of a residual stream x [M, hidden]: from an attention's
output to the first product of the feed-forward layer, and from there to the next qkv. Beside
Warploom's two kernels stand its own products with a norm by torch.compile between them, with the
residual in the first product or in the norm's kernel, and cuBLAS's. The weight of the norm is
multiplied into W for all of them, so that there is one result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._mixed_problem import KINDS, packed
from benchmarks.peers.libraries.triton import compiled
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.quantization import PackedWeight
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families._product.steps.rms import groups_of

EPS = 1e-5
ROUNDED = 2.0**-5  # of results that are rounded to bf16 between the products, beside the largest
Weight = torch.Tensor | PackedWeight


@dataclass(frozen=True, slots=True)
class Layers:
    """h [m, k], x [m, hidden], and the weights [hidden, k] and [n, hidden] of two layers."""

    h: torch.Tensor
    x: torch.Tensor
    first: Weight
    second: Weight
    sum: torch.Tensor
    y: torch.Tensor
    shares: torch.Tensor
    norm: torch.Tensor  # ones, which kernels of norms read all the same

    def exact(self) -> torch.Tensor:
        """y in float64."""
        first, second = (_wide(one) for one in (self.first, self.second))
        x = self.x.double() + self.h.double() @ first.t()
        normed: torch.Tensor = F.rms_norm(x, x.shape[-1:], None, EPS)
        return normed @ second.t()


def normed(family: str, asked: Asked) -> Iterator[Case]:
    """The listed pairs of layers at each M, in bf16 or with packed weights."""
    listed = cells()[family]["normed"]
    for kind in listed["types"]:
        for hidden, k, n in listed["layers"]:
            for m in asked.m or listed["m"]:
                shape = (m, hidden, k, n)
                name = f"normed {kind} {'x'.join(map(str, shape))}"
                problem = {"m": m, "n": n, "k": hidden, "type": kind, "epilogue": "RMS norm"}
                size = sum(_bytes(kind, weight) for weight in ((hidden, k), (n, hidden)))
                size += 2 * m * (k + 3 * hidden + n)
                floor = Floor.of(2 * m * hidden * (k + n), float(size), 16)
                yield Case(name, problem, floor, partial(_contenders, kind, shape))


def _bytes(kind: str, weight: tuple[int, int]) -> int:
    n, k = weight
    return 2 * n * k if kind == "bf16" else KINDS[kind].bytes((0, n, k))


def _contenders(kind: str, shape: tuple[int, int, int, int], asked: Asked) -> list[Contender]:
    _, hidden, k, n = shape
    size = _bytes(kind, (hidden, k)) + _bytes(kind, (n, hidden))
    draws = torch.Generator(asked.device).manual_seed(0)
    given = rotated(partial(_layers, kind, shape, asked.device, draws), size, asked.device)
    exact: list[torch.Tensor] = []
    norm, add_norm = compiled(lambda: _norm), compiled(lambda: _add_norm)

    def contender(name: str, call: Callable[[Layers], object], *, peer: bool = True) -> Contender:
        def share() -> float:
            call(given[0])
            if not exact:
                exact.append(given[0].exact())
            off = (given[0].y.double() - exact[0]).abs().max()
            return float(off / (ROUNDED * exact[0].abs().max()))

        return Contender(name, [partial(call, one) for one in given], share, peer=peer)

    found = [
        contender("warploom", _fused, peer=False),
        contender("warploom, torch.compile's norm", partial(_residual_fused, norm)),
        contender("warploom, torch.compile's add and norm", partial(_apart, _product, add_norm)),
    ]
    if kind == "bf16":
        found.append(
            contender("torch, torch.compile's add and norm", partial(_apart, _mm, add_norm))
        )
    return found


def _layers(
    kind: str, shape: tuple[int, int, int, int], device: str, draws: torch.Generator
) -> Layers:
    m, hidden, k, n = shape

    def normal(*extents: int) -> torch.Tensor:
        return torch.randn(*extents, generator=draws, device=device).bfloat16()

    first, second = (
        weight if kind == "bf16" else packed(weight, KINDS[kind])
        for weight in (normal(hidden, k) / k**0.5, normal(n, hidden) / hidden**0.5)
    )
    like: Any = {"dtype": torch.bfloat16, "device": device}
    return Layers(
        normal(m, k),
        normal(m, hidden),
        first,
        second,
        torch.empty(m, hidden, **like),
        torch.empty(m, n, **like),
        torch.empty(m, groups_of(hidden), device=device),
        torch.ones(hidden, **like),
    )


def _wide(weight: Weight) -> torch.Tensor:
    if isinstance(weight, PackedWeight):
        return weight.dequantize(torch.float64)
    return weight.double()


# ---- Ways to compute it --------------------------------------------------------------------------


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _add_norm(x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor) -> Any:  # noqa: ANN401
    found = x + more
    return found, F.rms_norm(found, x.shape[-1:], weight, EPS)


def _product(a: torch.Tensor, weight: Weight, out: torch.Tensor, **steps: Any) -> None:
    if isinstance(weight, PackedWeight):
        warploom.mixed_gemm(a, weight, out=out, **steps)
    else:
        warploom.gemm(a, weight.t(), out=out, **steps)


def _mm(a: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
    torch.mm(a, weight.t(), out=out)  # type: ignore[union-attr]


def _fused(one: Layers) -> None:
    squares = [("residual", one.x, 1.0), ("mean_square", one.shares)]
    _product(one.h, one.first, one.sum, epilogue=squares)
    _product(one.sum, one.second, one.y, epilogue=[("rms_scale", one.shares, EPS)])


def _residual_fused(norm: Callable[..., Any], one: Layers) -> None:
    _product(one.h, one.first, one.sum, residual=one.x)
    _product(norm(one.sum, one.norm), one.second, one.y)


def _apart(product: Callable[..., None], add_norm: Callable[..., Any], one: Layers) -> None:
    product(one.h, one.first, one.sum)
    _, normal = add_norm(one.x, one.sum, one.norm)
    product(normal, one.second, one.y)
