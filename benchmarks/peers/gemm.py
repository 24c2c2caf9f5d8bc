"""Products: squares and the layers of language models, beside cuBLAS, QuACK and Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch

import warploom
from benchmarks.families import Asked, Case, CellJson, Family, Group, Problem
from benchmarks.peers._block_scaled import block_scaled
from benchmarks.peers._block_sparse import block_sparse
from benchmarks.peers._compiled import compiling
from benchmarks.peers._drawn import drawn
from benchmarks.peers._gate_gradient import gate_gradients
from benchmarks.peers._gated import gated
from benchmarks.peers._grouped import few, grouped
from benchmarks.peers._libraries import GEMM
from benchmarks.peers._normed import normed
from benchmarks.peers._operations import fused, operations
from benchmarks.peers._products import TYPES, Shape, floor, ours, sets
from benchmarks.peers._rounding import rounded
from benchmarks.peers._strassen import strassen
from benchmarks.samplers import hosted
from warploom.generator.configurations import cells
from warploom.generator.families.gemm import GemmOperation, GemmShape, Layout
from warploom.generator.launches import NO_GPU
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender
from warploom.runtime.families import family
from warploom.runtime.measure import Call
from warploom.tuning import problems as tuning

LISTED = cells()["gemm"]


# ---- Cells ---------------------------------------------------------------------------------------


def squares(_asked: Asked) -> list[Shape]:
    """Large products."""
    return [(m, n, k) for m, n, k in LISTED["squares"]]


def layers(asked: Asked) -> list[Shape]:
    """The layers of language models, at any numbers of rows."""
    rows = asked.m or [*LISTED["m"], *LISTED["ragged_m"]]
    return [(m, n, k) for n, k in LISTED["weights"] for m in rows]


def tuned(_asked: Asked) -> list[Shape]:
    """The layers at the numbers of rows that are tuned."""
    return [(m, n, k) for n, k in LISTED["weights"] for m in LISTED["tuned_m"]]


def plain(shapes: Callable[[Asked], list[Shape]], asked: Asked) -> Iterator[Case]:
    """Products of every type without a further epilogue."""
    for name, operation in TYPES.items():
        for shape in shapes(asked):
            yield case(f"{name} {'x'.join(map(str, shape))}", operation, shape, type=name)


def training(_asked: Asked) -> Iterator[Case]:
    """Every pair of layouts at 4096 cubed, and the three products of training a linear layer."""
    words: dict[str, Layout] = {"N": "row", "T": "col"}
    m, n, k = LISTED["trained"]
    # y = x w^T; dx = dy w; dw = dy^T x, with x [m, k], w [n, k] and dy [m, n], all row-major.
    layouts: list[tuple[str, Shape, Layout, Layout]] = [
        *(
            (f"{a}{b} 4096x4096x4096", (4096,) * 3, words[a], words[b])
            for a, b in product(words, words)
        ),
        ("forward", (m, n, k), "row", "col"),
        ("gradient of the input", (m, k, n), "row", "row"),
        ("gradient of the weight", (n, k, m), "col", "row"),
    ]
    for name, shape, a, b in layouts:
        operation = replace(TYPES["bf16"], layout_a=a, layout_b=b)
        yield case(name, operation, shape, type="bf16", layout_a=a, layout_b=b)


def case(name: str, operation: GemmOperation, shape: Shape, **about: Any) -> Case:
    """Warploom as dispatched, its peers, and each kernel that competes and computes the same."""

    def contenders(asked: Asked) -> Iterator[Contender]:
        given = sets(operation, shape, asked.device)
        yield ours(operation, given)
        for word in asked.peers or GEMM:
            if word in GEMM:
                yield GEMM[word](operation, given)
        for spec in asked.specs:
            if spec.operation == operation:
                yield ours(operation, given, spec.name, spec)

    problem = {**dict(zip("mnk", shape, strict=True)), **about}
    return Case(name, problem, floor(operation, shape), lambda asked: list(contenders(asked)))


def host(_asked: Asked) -> Iterator[Case]:
    """Host time of a warm call that is too small to keep the GPU busy."""
    shape = (256, 256, 256)

    def contenders(asked: Asked) -> list[Contender]:
        (one, *_) = sets(TYPES["bf16"], shape, asked.device)
        a, b, out = one.a, one.b, one.out
        plan = warploom.plan(a, b, out=out)
        calls: dict[str, Call] = {
            "warploom.gemm": lambda: warploom.gemm(a, b),
            "torch.mm": lambda: torch.mm(a, b),
            "warploom.gemm, out given": lambda: warploom.gemm(a, b, out=out),
            "torch.mm, out given": lambda: torch.mm(a, b, out=out),
            "plan, out given": lambda: plan(a, b, out),
        }
        return [Contender(name, [call]) for name, call in calls.items()]

    problem = dict(zip("mnk", shape, strict=True))
    yield Case("host time of a call", problem, None, contenders, hosted, rounds=27)


def shipped(asked: Asked) -> list[KernelSpec]:
    """Every kernel that a cell is given without records."""
    return [
        choice.spec
        for operation in TYPES.values()
        for shape in (*squares(asked), *layers(asked))
        for choice in family("gemm").choices(operation, GemmShape(*shape), NO_GPU)
    ]


# ---- What pages say ------------------------------------------------------------------------------


@cache
def weights() -> dict[tuple[int, int], str]:
    """What each weight is, by its extents [n, k], in the order of the list."""
    return dict(zip(((n, k) for n, k in LISTED["weights"]), LISTED["names"], strict=True))


class Products(Family):
    """D[m, n] = A[m, k] B[k, n]."""

    def subject(self, problem: Problem) -> str:
        """The layer, or the extents of its weight."""
        n, k = problem["n"], problem["k"]
        return weights().get((n, k), f"{n}x{k}")

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By layer, then M."""
        weight = (problem["n"], problem["k"])
        return [*weights(), weight].index(weight), *weight, problem["m"]

    def flops(self, problem: Problem) -> float | None:
        """Two for each step of each sum."""
        return float(2 * problem["m"] * problem["n"] * problem["k"] * problem.get("batch", 1))

    def label(self, cell: CellJson) -> str:
        """The cell's own name, and that of the layer where it has one."""
        name, problem = str(cell["name"]), cell["problem"]
        m, n, k = (problem[extent] for extent in "mnk")
        known = (n, k) in weights() and name == f"{problem.get('type')} {m}x{n}x{k}"
        return f"{name}, {self.subject(problem)}" if known else name


FAMILY = Products(
    name="gemm",
    examined=tuning.Problem(TYPES["bf16"], GemmShape(4096, 4096, 4096), ()),
    groups={
        "llm": Group("{kind}, layers of language models", partial(plain, layers), "{kind}"),
        "squares": Group("{kind}, large matrices", partial(plain, squares), "{kind}"),
        "tuned": Group("{kind}, layers of language models, at tuned M", partial(plain, tuned)),
        "untuned": Group("{kind}, large matrices, not tuned"),
        "drawn": Group("{kind}, sampled shapes that nobody tuned", drawn),
        "training": Group(
            "{kind}, every layout, and the three GEMMs of training a layer", training
        ),
        "operations": Group(
            "GEMM, two-level accumulation, 8-bit results, batches, accumulation in place",
            operations,
            listed=True,
            fixed=True,
        ),
        "block_scaled": Group("{kind}", block_scaled, "{kind}", about="fp8 with block scales"),
        "fused": Group(
            "GEMM, bf16, with scale, bias, gelu and residual in the epilogue",
            fused,
            listed=True,
            fixed=True,
        ),
        "gated": Group(
            "GEMM, silu(gate) * up in the epilogue and in a kernel after it",
            gated,
            listed=True,
            about="and whole layers: both passes in bf16, forward in fp8 with block scales",
            fixed=True,
        ),
        "gate_gradients": Group(
            "GEMM, the gradient of a gate in the epilogue and in a kernel after it",
            gate_gradients,
            listed=True,
            fixed=True,
        ),
        "rounding": Group(
            "GEMM, rounded stochastically and to nearest", rounded, listed=True, fixed=True
        ),
        "strassen": Group(
            "GEMM, bf16, by Strassen's algorithm and as one GEMM",
            strassen,
            listed=True,
            fixed=True,
        ),
        "block_sparse": Group(
            "GEMM, bf16, block-sparse, in blocks of 128x128", block_sparse, listed=True, fixed=True
        ),
        "grouped": Group(
            "Grouped GEMM, whose groups end at offsets on the device",
            grouped,
            listed=True,
            about="in bf16 and fp8 with block scales; gradients, also in fp8; masked batches",
        ),
        "grouped_few": Group(
            "Grouped GEMM of a few tokens, with a row or two for each expert",
            few,
            listed=True,
        ),
        "normed": Group(
            "GEMM, an RMS norm through two epilogues and as a kernel of its own",
            partial(normed, "gemm"),
            listed=True,
            fixed=True,
        ),
        "host": Group("GEMM, bf16, host time of a warm call", host, listed=True, fixed=True),
        "compile": Group(
            "Compilation of a shipped kernel by NVRTC, in a fresh process",
            lambda asked: compiling(shipped(asked), asked.baseline),
            listed=True,
            fixed=True,
        ),
    },
    grid=("llm", "squares"),
    kinds={
        "bf16": "GEMM, bf16",
        "fp16": "GEMM, fp16",
        "e4m3": "GEMM, e4m3, one scale per tensor",
        "e4m3_row_column": "GEMM, e4m3, a scale per row and column",
        "int8": "GEMM, int8",
        "e4m3_block_few": "GEMM, e4m3, block scales of 1x128 by 128x128, up to 128 rows",
        "e4m3_block": "GEMM, e4m3, block scales of 1x128 by 128x128",
        "e4m3_block_row": "GEMM, e4m3, block scales of 1x128 both",
    },
    peers={
        "cublas": "torch.mm",
        "triton": "triton",
        "quack": "quack",
        "deep_gemm": "deep_gemm",
        "torch": "torch._grouped_mm",
    },
    called={
        "torch.mm": "torch.mm (cuBLAS)",
        "torch._scaled_mm": "torch._scaled_mm (cuBLAS)",
        "quack": "QuACK",
        "triton": "Triton",
    },
    absences={"size(0) needs to be greater than 16": "it takes more than 16 rows"},
    axis=("M", "M, rows of the input"),
)
