"""What the wider operations of GEMM cost: promoted sums, 8-bit outputs, batches, sums in place.

Each cell holds one of them beside what it would replace: the fast sums of the same product, its
output in bf16, torch.bmm, torch.mm with an addition after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import warploom
from benchmarks.peers import KINDS, operands
from benchmarks.protocol import Cell, Contender, compete, gemm_floor
from warploom.runtime.epilogue import Item
from warploom.runtime.measure import Call, Sampler, error_share, graph_sampler

Shape = tuple[int, int, int]  # m, n, k
SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (4096, 7168, 2048),
    (2048, 4096, 4096),
    (16384, 2048, 7168),
)
BATCHES: tuple[tuple[int, int, int, int], ...] = (  # batches, m, n, k
    (64, 512, 512, 512),
    (256, 128, 128, 1024),
    (16, 4096, 4096, 512),
    (4096, 64, 64, 128),
    (32, 1, 4096, 4096),
)
LAYER: Shape = (4096, 14336, 4096)
Sampling = Callable[[Sequence[Call]], Sampler]


def operations(sampler: Sampling = graph_sampler) -> Iterator[Cell]:
    """Every cell, on the GPU."""
    for shape in SHAPES:
        yield promoted(shape, sampler=sampler)
    for kind in ("bf16", "e4m3"):
        for shape in (LAYER, *SHAPES[:3]):
            yield quantised(kind, shape, sampler=sampler)
    for batch, *extents in BATCHES:
        m, n, k = extents
        yield batched(batch, (m, n, k), sampler=sampler)
    yield in_place(sampler=sampler)


def promoted(shape: Shape, device: str = "cuda", sampler: Sampling = graph_sampler) -> Cell:
    """Sums of e4m3 products promoted to fp32 beside fast ones, both scaled per tensor."""
    one = operands(KINDS["e4m3"], *shape, device)

    def contender(accumulation: str) -> Contender:
        out = _unwritten(shape[:2], torch.bfloat16, device)
        keywords: Any = {"out": out, "epilogue": one.listed, "accumulation": accumulation}
        return Contender(
            accumulation,
            [lambda: warploom.gemm(one.a, one.b, **keywords)],
            lambda: error_share(out, one.a, one.b, one.listed),
            lambda: warploom.explain(one.a, one.b, **keywords).kernel,
        )

    contenders = [contender("promoted"), contender("fast")]
    return _cell(f"promoted {_text(shape)}", shape, (8, 16), contenders, sampler)


def quantised(
    kind_name: str, shape: Shape, device: str = "cuda", sampler: Sampling = graph_sampler
) -> Cell:
    """An e4m3 output with scale and amax beside one in bf16."""
    kind = replace(KINDS[kind_name], scaling="none")
    one = operands(kind, *shape, device)
    scale, amax = torch.tensor([0.5], device=device), torch.zeros(1, device=device)

    def contender(name: str, dtype: torch.dtype, listed: Sequence[Item]) -> Contender:
        out = _unwritten(shape[:2], dtype, device)
        return Contender(
            name,
            [lambda: warploom.gemm(one.a, one.b, out=out, epilogue=listed)],
            lambda: error_share(out, one.a, one.b, listed),
            lambda: warploom.explain(one.a, one.b, out=out, epilogue=listed).kernel,
        )

    scaled = ("scale", scale)
    contenders = [
        contender("e4m3 with amax", torch.float8_e4m3fn, (scaled, ("amax", amax), scaled)),
        contender("bf16", torch.bfloat16, (scaled,)),
    ]
    bits = (kind.bits[0], 8)
    return _cell(f"quantised {kind_name} {_text(shape)}", shape, bits, contenders, sampler)


def batched(
    batch: int, shape: Shape, device: str = "cuda", sampler: Sampling = graph_sampler
) -> Cell:
    """A batch of products beside torch.bmm, B with rows as torch makes it."""
    m, n, k = shape
    a, b = (torch.randn(batch, *size, device=device).bfloat16() for size in ((m, k), (k, n)))

    def contender(name: str, function: Callable[..., object]) -> Contender:
        out = _unwritten((batch, m, n), torch.bfloat16, device)
        return Contender(name, [lambda: function(a, b, out=out)], lambda: error_share(out, a, b))

    contenders = [contender("warploom", warploom.gemm), contender("torch.bmm", torch.bmm)]
    return _cell(f"batch {batch} {_text(shape)}", shape, (16, 16), contenders, sampler)


def in_place(shape: Shape = LAYER, device: str = "cuda", sampler: Sampling = graph_sampler) -> Cell:
    """The gradient of a weight [n, k], added to fp32 memory: in the kernel, and after torch.mm."""
    m, n, k = shape
    dy, x = (torch.randn(m, size, device=device).bfloat16() for size in (n, k))
    sums = [torch.zeros(n, k, device=device) for _ in range(2)]
    gradient = torch.empty(n, k, device=device, dtype=torch.bfloat16)

    def after() -> None:
        torch.mm(dy.mT, x, out=gradient)
        sums[1].add_(gradient)

    ours: Any = {"out": sums[0], "residual": sums[0], "out_dtype": torch.float32}
    contenders = [
        Contender("in place", [lambda: warploom.gemm(dy.mT, x, **ours)]),
        Contender("torch.mm and add_", [after]),
    ]
    return _cell(f"in place {_text((n, k, m))}", (n, k, m), (16, 32), contenders, sampler)


def _cell(
    name: str,
    shape: Shape,
    bits: tuple[int, int],
    contenders: Sequence[Contender],
    sampler: Sampling,
) -> Cell:
    problem = dict(zip("mnk", shape, strict=True))
    return compete(name, problem, contenders, gemm_floor(*shape, *bits), sampler=sampler)


def _unwritten(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, math.nan, device=device).to(dtype)


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))
