"""Products with 2:4 sparse weights, beside cuBLAS by the dense weight, cuSPARSELt and our gemm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers._moving import contenders as moving
from warploom.generator.configurations import cells
from warploom.generator.families.sparse_gemm import SparseGemmOperation, SparseGemmShape
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.families.sparse_gemm.call import SparseGemmCall
from warploom.runtime.families.sparse_gemm.family import FAMILY as RUNTIME
from warploom.runtime.measure import largest_share
from warploom.runtime.plan import run

OPERATION = SparseGemmOperation("bf16")
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def moved(shape: SparseGemmShape) -> int:
    """Bytes of x, of y, and of values and metadata: 9/16 of the dense weight's."""
    return 2 * (shape.m * shape.k + shape.m * shape.n) + shape.n * shape.k * 9 // 8


def cases(_asked: Asked) -> Iterator[Case]:
    """Each weight by each number of rows."""
    listed = cells()["sparse_gemm"]
    for n, k in listed["weights"]:
        for m in listed["m"]:
            shape = SparseGemmShape(m, n, k)
            # Sparse tensor cores have twice the rate: half of the dense product's operations count.
            floor = Floor.of(m * n * k, moved(shape))
            about = {"m": m, "n": n, "k": k, "type": "bf16"}
            yield Case(f"{m}x{n}x{k}", about, floor, partial(contenders, shape))


def contenders(shape: SparseGemmShape, asked: Asked) -> list[Contender]:
    """Warploom as dispatched, its peers, and each kernel that competes and computes the same."""
    beside = list[Contender]()

    def cublas(given: Sequence[SparseGemmCall]) -> Contender:
        beside.append(by_dense("warploom.gemm, dense weight", gemm, given))
        if asked.device != "cpu" and (not asked.peers or "cusparselt" in asked.peers):
            beside.append(semi_structured(given))
        return by_dense("torch.mm (cuBLAS), dense weight", torch.mm, given, peer=True)

    draw = partial(RUNTIME.draw, OPERATION, shape, asked.device, None)
    ours = moving(draw, moved(shape), OPERATION, asked, ours=run, torchs=cublas, error_share=wrong)
    return [*ours[:2], *beside, *ours[2:]]


def by_dense(
    name: str, multiply: Multiply, given: Sequence[SparseGemmCall], *, peer: bool = False
) -> Contender:
    """A product by the dense weight."""
    dense = [one.weight.dense().t() for one in given]
    calls = [partial(multiply, one.x, other) for one, other in zip(given, dense, strict=True)]
    return Contender(name, calls, lambda: wrong(given[0], calls[0]), peer=peer)


def semi_structured(given: Sequence[SparseGemmCall]) -> Contender:
    """torch's semi-structured tensors: cuSPARSELt, where torch has it, else CUTLASS."""
    weights = [torch.sparse.to_sparse_semi_structured(one.weight.dense()) for one in given]
    calls = [
        partial(torch.nn.functional.linear, one.x, other)
        for one, other in zip(given, weights, strict=True)
    ]
    return Contender(
        "torch semi-structured (cuSPARSELt)", calls, lambda: wrong(given[0], calls[0]), peer=True
    )


def wrong(one: SparseGemmCall, call: Callable[[], torch.Tensor | tuple[torch.Tensor]]) -> float:
    """The largest error of what a call on these operands returns, as a share of its bound."""
    found = call()
    y = found if isinstance(found, torch.Tensor) else found[0]
    return largest_share(y, *RUNTIME.bound(one))


class SparseProducts(Family):
    """y = x W', W 2:4 sparse."""

    def subject(self, problem: Problem) -> str:
        """The weight."""
        return f"{problem['n']}x{problem['k']}"

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By the weight, then m."""
        return problem["n"] * problem["k"], problem["n"], problem["m"]

    def flops(self, problem: Problem) -> float:
        """The operations of the dense product, as those who sell sparsity count them."""
        return float(2 * problem["m"] * problem["n"] * problem["k"])


FAMILY = SparseProducts(
    name="sparse_gemm",
    groups={"weights": Group("{kind}", cases, "{kind}")},
    grid=("weights",),
    kinds={"bf16": "Products with 2:4 sparse weights, bf16"},
    peers={
        "torch": "torch.mm (cuBLAS), dense weight",
        "cusparselt": "torch semi-structured (cuSPARSELt)",
    },
    axis=("M", "M, rows"),
)
