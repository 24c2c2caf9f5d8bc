"""What the wider operations of GEMM cost: promoted sums, 8-bit outputs, batches, sums in place.

Each cell holds one of them beside what it would replace: the fast sums of the same product, its
output in bf16, torch.bmm, torch.mm with an addition after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

import warploom
from benchmarks.cells import Shape, cells, problem, text, trained
from benchmarks.cells import batched as batches
from benchmarks.peers import KINDS, operand_sets, ours
from benchmarks.protocol import Cell, Contender, compete, gemm_floor
from warploom.runtime.measure import Call, Sampler, error_share, graph_sampler

Sampling = Callable[[Sequence[Call]], Sampler]


def operations() -> Iterator[Cell]:
    """Every cell, on the GPU."""
    yield from map(promoted, cells("squares"))
    for kind in ("bf16", "e4m3"):
        for shape in (trained(), *cells("squares")):
            yield quantised(kind, shape)
    for batch, shape in batches():
        yield batched(batch, shape)
    yield in_place(trained())


def promoted(shape: Shape, device: str = "cuda", sampler: Sampling = graph_sampler) -> Cell:
    """Sums of e4m3 products promoted to fp32 beside fast ones, both scaled per tensor."""
    kind = KINDS["e4m3"]
    sets = operand_sets(kind, shape, device)
    contenders = [
        ours(kind, sets, name="promoted", accumulation="promoted"),
        ours(kind, sets, name="fast"),
    ]
    floor = gemm_floor(*shape, *kind.bits)
    name = f"promoted {text(shape)}"
    return compete(name, problem(shape), contenders, floor, sampler=sampler)


def quantised(
    kind_name: str, shape: Shape, device: str = "cuda", sampler: Sampling = graph_sampler
) -> Cell:
    """An e4m3 output with scale and amax beside one in bf16."""
    plain = replace(KINDS[kind_name], scaling="none")
    kind = replace(plain, d="e4m3")
    sets = operand_sets(plain, shape, device)
    scaled = ("scale", torch.tensor([0.5], device=device))
    listed = (scaled, ("amax", torch.zeros(1, device=device)), scaled)
    contenders = [
        ours(kind, sets, name="e4m3 with amax", listed=listed),
        ours(plain, sets, name="bf16", listed=(scaled,)),
    ]
    floor = gemm_floor(*shape, *kind.bits)
    name = f"quantised {kind_name} {text(shape)}"
    return compete(name, problem(shape), contenders, floor, sampler=sampler)


def batched(
    batch: int, shape: Shape, device: str = "cuda", sampler: Sampling = graph_sampler
) -> Cell:
    """A batch of products beside torch.bmm, B with rows as torch makes it."""
    m, n, k = shape
    a, b = (torch.randn(batch, *size, device=device).bfloat16() for size in ((m, k), (k, n)))

    def contender(name: str, function: Callable[..., object]) -> Contender:
        out = torch.full((batch, m, n), math.nan, dtype=a.dtype, device=device)
        return Contender(name, [lambda: function(a, b, out=out)], lambda: error_share(out, a, b))

    contenders = [contender("warploom", warploom.gemm), contender("torch.bmm", torch.bmm)]
    name = f"batch {batch} {text(shape)}"
    about = problem(shape, batch=batch)
    floor = gemm_floor(*shape, 16, 16)
    whole = replace(floor, seconds=batch * floor.seconds)
    return compete(name, about, contenders, whole, sampler=sampler)


def in_place(shape: Shape, device: str = "cuda", sampler: Sampling = graph_sampler) -> Cell:
    """The gradient of a weight [n, k], added to fp32 memory: in the kernel, and after torch.mm."""
    m, n, k = shape
    dy, x = (torch.randn(m, size, device=device).bfloat16() for size in (n, k))
    sums = torch.zeros(n, k, device=device)
    peers_sums, gradient = torch.zeros_like(sums), torch.empty_like(sums, dtype=torch.bfloat16)

    def ours() -> None:
        warploom.gemm(dy.mT, x, out=sums, residual=sums, out_dtype=sums.dtype)

    def after() -> None:
        torch.mm(dy.mT, x, out=gradient)
        peers_sums.add_(gradient)

    def share() -> float:
        before = torch.ones_like(sums)
        sums.copy_(before)
        ours()
        return error_share(sums, dy.mT, x, (("residual", before, 1.0),))

    contenders = [
        Contender("in place", [ours], share),
        Contender("torch.mm and add_", [after], lambda: error_share(gradient, dy.mT, x)),
    ]
    turned = (n, k, m)
    floor = gemm_floor(*turned, 16, 32)
    name = f"in place {text(turned)}"
    return compete(name, problem(turned), contenders, floor, sampler=sampler)
