"""Products with 2:4 sparse weights, beside cuBLAS by the dense weight, cuSPARSELt and our gemm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers._moving import contenders as moving
from warploom.generator.configurations import cells
from warploom.generator.elements import element
from warploom.generator.families.sparse_gemm import SparseGemmOperation, SparseGemmShape
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.families.sparse_gemm.call import SparseGemmCall
from warploom.runtime.families.sparse_gemm.family import FAMILY as RUNTIME
from warploom.runtime.plan import run

OPERATIONS = {
    "bf16": SparseGemmOperation("bf16"),
    "e4m3": SparseGemmOperation("e4m3", output="bf16", scaled=True),
    "int8": SparseGemmOperation("int8", output="bf16", scaled=True),
}
Multiply = Callable[[SparseGemmCall, torch.Tensor], torch.Tensor]


def moved(shape: SparseGemmShape, kind: str = "bf16") -> int:
    """Bytes of x, of y, and of values and metadata: 2 bits for each value."""
    size = element(kind).bytes
    weight = shape.n * shape.k * (4 * size + 1) // 8
    return size * shape.m * shape.k + 2 * shape.m * shape.n + weight


def cases(_asked: Asked) -> Iterator[Case]:
    """Each weight by each number of rows, in each type."""
    listed = cells()["sparse_gemm"]
    for kind, operation in OPERATIONS.items():
        for n, k in listed["weights"]:
            for m in listed["m"]:
                shape = SparseGemmShape(m, n, k)
                # Sparse tensor cores have twice the rate: half of the dense GEMM's flops count.
                floor = Floor.of(m * n * k, moved(shape, kind), element(kind).bits)
                about = {"m": m, "n": n, "k": k, "type": kind}
                name = f"{m}x{n}x{k}" if kind == "bf16" else f"{kind} {m}x{n}x{k}"
                yield Case(name, about, floor, partial(contenders, operation, shape))


def contenders(
    operation: SparseGemmOperation, shape: SparseGemmShape, asked: Asked
) -> list[Contender]:
    """Warploom as dispatched, its peers, and each kernel that competes and computes the same."""
    beside = list[Contender]()

    def cublas(given: Sequence[SparseGemmCall]) -> Contender:
        beside.append(by_dense("warploom.gemm, dense weight", dense_gemm, given))
        if operation.element != "bf16":
            name = f"torch.{'_int_mm' if operation.element == 'int8' else '_scaled_mm'} (cuBLAS)"
            return by_dense(f"{name}, dense weight", torch_gemm, given, peer=True)
        if asked.device != "cpu" and (not asked.peers or "cusparselt" in asked.peers):
            beside.append(semi_structured(given))
        return by_dense("torch.mm (cuBLAS), dense weight", torch_gemm, given, peer=True)

    draw = partial(RUNTIME.draw, operation, shape, asked.device, None)
    ours = moving(
        draw,
        moved(shape, operation.element),
        operation,
        asked,
        ours=run,
        torchs=cublas,
        error_share=wrong,
    )
    return [*ours[:2], *beside, *ours[2:]]


def by_dense(
    name: str, multiply: Multiply, given: Sequence[SparseGemmCall], *, peer: bool = False
) -> Contender:
    """A product by the dense weight."""
    dense = [one.weight.dense().t() for one in given]
    calls = [partial(multiply, one, other) for one, other in zip(given, dense, strict=True)]
    return Contender(name, calls, lambda: wrong(given[0], calls[0]), peer=peer)


def dense_gemm(one: SparseGemmCall, weight: torch.Tensor) -> torch.Tensor:
    """Warploom's dense GEMM, with the same scales."""
    return gemm(one.x, weight, scale_a=one.scale_x, scale_b=one.scale_weight, out_dtype=one.of_y)


def torch_gemm(one: SparseGemmCall, weight: torch.Tensor) -> torch.Tensor:
    """torch's dense GEMM: of int8 its scales are further kernels."""
    if one.scale_x is None or one.scale_weight is None:
        return torch.mm(one.x, weight)
    scale_x, scale_weight = one.scale_x[:, None], one.scale_weight[None]
    if one.x.dtype == torch.int8:
        return (torch._int_mm(one.x, weight) * scale_x * scale_weight).to(one.of_y)
    return torch._scaled_mm(
        one.x,
        weight,
        scale_a=scale_x,
        scale_b=scale_weight,
        out_dtype=one.of_y,
        use_fast_accum=True,
    )


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
    return RUNTIME.share([y], RUNTIME.expected(one))


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
    kinds={kind: f"GEMM with 2:4 sparse weights, {kind}" for kind in OPERATIONS},
    peers={
        "torch": "torch.mm (cuBLAS), dense weight",
        "cusparselt": "torch semi-structured (cuSPARSELt)",
    },
    axis=("M", "M, rows"),
)
