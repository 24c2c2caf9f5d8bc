"""GEMMs of matrices that are sparse by blocks, beside dense ones and torch's BSR; and layers.

Masks are random, so that lists differ in length. A dense GEMM computes all blocks: its time over
the sparse one's, times the density, is the share of the dense rate that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._products import TYPES, Shape, moved, ours, sets
from warploom.generator.configurations import cells
from warploom.generator.epilogue import Scale
from warploom.generator.families.gemm import SPARSE_BLOCK, GemmOperation, Layout, Sparse
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.gemm.block_masks import expanded, size_of
from warploom.runtime.families.gemm.family import by_bsr
from warploom.runtime.families.gemm.samples import Operands, sparse_call
from warploom.runtime.measure import largest_share
from warploom.runtime.plan import run
from warploom.runtime.trial import wrong

# The layouts of the three GEMMs of a layer whose input is sparse by blocks.
LAYOUTS: dict[Sparse, tuple[Layout, Layout]] = {
    "a": ("row", "col"),  # x w^T
    "b": ("col", "row"),  # dy^T x
    "d": ("row", "row"),  # dy w
}


def block_sparse(asked: Asked) -> Iterator[Case]:
    """The listed products at each density, of each sparse matrix; then layers that drop blocks."""
    listed = cells()["gemm"]["block_sparse"]
    for shape in map(tuple, listed["shapes"]):
        for density in listed["densities"]:
            for sparse in LAYOUTS:
                name = f"sparse {sparse} {density} {'x'.join(map(str, shape))}"
                m, n, k = shape
                problem = {"m": m, "n": n, "k": k, "type": "bf16", "epilogue": f"sparse {sparse}"}
                floor = Floor.of(2 * m * n * k * density, moved(TYPES["bf16"], shape), 16)
                yield Case(name, problem, floor, partial(_contenders, sparse, density, shape))
    for shape in map(tuple, listed["layers"]):
        m, n, k = shape
        problem = {"m": m, "n": n, "k": k, "type": "bf16", "epilogue": "dropped blocks"}
        floor = Floor.of(3 * m * n * k, 3 * moved(TYPES["bf16"], shape), 16)
        name = f"dropout of blocks 0.5, both passes {'x'.join(map(str, shape))}"
        yield Case(name, problem, floor, partial(_layers, shape), gradients=True)


def _contenders(sparse: Sparse, density: float, shape: Shape, asked: Asked) -> list[Contender]:
    layout_a, layout_b = LAYOUTS[sparse]
    plain = replace(TYPES["bf16"], layout_a=layout_a, layout_b=layout_b, epilogue=(Scale("host"),))
    m, n, k = shape
    blocks = tuple(-(-size // SPARSE_BLOCK) for size in size_of(sparse, m, n, k))
    draws = torch.Generator(asked.device).manual_seed(0)
    given = [
        replace(
            one,
            mask=torch.rand(blocks, generator=draws, device=asked.device) < density,
        )
        for one in sets(replace(plain, sparse=sparse), shape, asked.device)
    ]
    found = [
        _contender("warploom", sparse, given),
        *(
            _contender(spec.name, sparse, given, spec)
            for spec in asked.specs
            if spec.operation == replace(plain, sparse=sparse)
        ),
        replace(ours(plain, given, "warploom, dense"), peer=True),
    ]
    if sparse == "a" and m % SPARSE_BLOCK == k % SPARSE_BLOCK == 0:
        found.append(_bsr(plain, given))
    return found


def _contender(
    name: str, sparse: Sparse, given: list[Operands], spec: KernelSpec | None = None
) -> Contender:
    outs = [replace(one, out=wrong(torch.empty_like(one.out))) for one in given]

    def call(one: Operands) -> torch.Tensor:
        return run(sparse_call(sparse, one, spec))[0]

    def share() -> float:
        return max(largest_share(call(one), *sparse_call(sparse, one).bound()) for one in outs[:1])

    return Contender(name, [partial(call, one) for one in outs], share)


def _bsr(plain: GemmOperation, given: list[Operands]) -> Contender:
    calls = []
    for one in given:
        assert one.mask is not None  # noqa: S101 (for type checkers)
        counting = torch.where(expanded(one.mask, *one.a.shape), one.a, 0.0)
        calls.append(partial(by_bsr, counting.to_sparse_bsr((SPARSE_BLOCK, SPARSE_BLOCK)), one))
    return Contender("torch BSR (Triton)", calls, peer=True)


def _layers(shape: Shape, asked: Asked) -> list[Contender]:
    m, n, k = shape
    like: Any = {"device": asked.device, "dtype": torch.bfloat16}
    x, dy = torch.randn(m, k, **like, requires_grad=True), torch.randn(m, n, **like)

    def passes(p: float) -> Callable[[], object]:
        layer = warploom.nn.Linear(k, n, bias=False, dropout_blocks=p, **like)
        return lambda: torch.autograd.grad(layer(x), (x, layer.weight), dy)

    return [
        Contender("warploom", [passes(0.5)]),
        Contender("warploom, nothing dropped", [passes(0.0)], peer=True),
    ]
