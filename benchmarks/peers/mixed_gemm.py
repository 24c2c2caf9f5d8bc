"""Products of quantised weights: layers of language models, beside Marlin, Machete and humming.

A cell's figure is of the fastest library that multiplies the same quantised numbers; the dense
products that they would replace stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers._libraries import MIXED
from benchmarks.peers._mixed_contenders import contenders
from benchmarks.peers._mixed_decode import Model
from benchmarks.peers._mixed_decode import contenders as decoding
from benchmarks.peers._mixed_experts import experts
from benchmarks.peers._mixed_gated import mixed_gated
from benchmarks.peers._mixed_problem import KINDS
from benchmarks.peers._normed import normed
from warploom.generator.configurations import cells

LISTED = cells()["mixed_gemm"]
ROW = "Mixed GEMM, weights in 4 and 8 bits"  # of the README: the page tells kinds apart
FEW = 64  # rows up to which the weight's bytes decide


def layers(asked: Asked, kinds: tuple[str, ...] = ()) -> Iterator[Case]:
    """Every weight in every kind, at any numbers of rows."""
    for name in kinds or LISTED["types"]:
        kind = KINDS[name]
        for n, k in LISTED["weights"]:
            for m in asked.m or LISTED["m"]:
                shape = m, n, k
                problem = {**dict(zip("mnk", shape, strict=True)), "type": name}
                make = partial(contenders, kind, shape)
                yield Case(f"{name} {m}x{n}x{k}", problem, kind.floor(shape), make)


def zeros(asked: Asked) -> Iterator[Case]:
    """The same with zero points."""
    return layers(asked, ("w4a16_zeros",))


def two_bits(asked: Asked) -> Iterator[Case]:
    """Weights of 2 bits, by int8 and by bf16."""
    return layers(asked, ("ternary_a8", "ternary_a16", "w2a8"))


def nvfp4(asked: Asked) -> Iterator[Case]:
    """NVFP4 weights by bf16."""
    return layers(asked, ("nvfp4",))


def mxfp8(asked: Asked) -> Iterator[Case]:
    """MXFP8 weights, by bf16 and by e4m3."""
    return layers(asked, ("mxfp8", "mxfp8_a8"))


def decode(_asked: Asked) -> Iterator[Case]:
    """A step of decoding, all of its layers, with the head and attention in bf16."""
    listed = dict(LISTED["decode"])
    batches, kinds = listed.pop("batch"), listed.pop("types")
    model = Model(**listed)
    for name in kinds:
        for batch in batches:
            problem = {"m": batch, "n": model.hidden, "k": model.hidden, "type": name}
            make = partial(decoding, model, KINDS[name], batch)
            floor = model.floor(KINDS[name], batch)
            yield Case(f"decode {name}, batch {batch}", {**problem, **listed}, floor, make)


class MixedProducts(Family):
    """D[m, n] = A[m, k] W[n, k]^T, W quantised."""

    def subject(self, problem: Problem) -> str:
        """The extents of the weight."""
        return f"{problem['n']}x{problem['k']}"

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By weight, in the order of the list, then M."""
        weight, listed = [problem["n"], problem["k"]], LISTED["weights"]
        return [*listed, weight].index(weight), *weight, problem["m"]

    def flops(self, problem: Problem) -> float | None:
        """Two for each step of each sum; none of a step of decoding, nor of experts."""
        if "layers" in problem or "experts" in problem:
            return None
        return float(2 * problem["m"] * problem["n"] * problem["k"])

    def division(self, problem: Problem) -> str:
        """The type, and whether bytes or products decide."""
        rows = "to" if problem["m"] <= FEW else "above"
        return f"{problem['type']}, M {rows} {FEW}"


FAMILY = MixedProducts(
    name="mixed_gemm",
    groups={
        "llm": Group(
            "{kind}, layers of language models", layers, ROW, about="weights in 4 and 8 bits"
        ),
        "zeros": Group("{kind}, layers of language models", zeros, about="uint4 with zero points"),
        "nvfp4": Group("{kind}, layers of language models", nvfp4, about="NVFP4 weights"),
        "mxfp8": Group("{kind}, layers of language models", mxfp8, about="MXFP8 weights"),
        "two_bits": Group("{kind}, layers of language models", two_bits, about="2-bit weights"),
        "gated": Group(
            "{kind}, silu(gate) * up in the epilogue and in a kernel after it",
            mixed_gated,
            fixed=True,
        ),
        "normed": Group(
            "{kind}, an RMS norm through two epilogues and as a kernel of its own",
            partial(normed, "mixed_gemm"),
            fixed=True,
        ),
        "decode": Group("{kind}: a step of decoding, compared with bf16", decode),
        "experts": Group("{kind}: experts, compared with humming and bf16", experts, listed=True),
    },
    grid=("llm",),
    kinds={
        "w4a16": "Mixed GEMM, int4 by bf16, groups of 128",
        "mxfp4": "Mixed GEMM, mxfp4 by bf16",
        "w8a16": "Mixed GEMM, e4m3 by bf16, a scale per row",
        "w4a8": "Mixed GEMM, int4 by e4m3, groups of 128",
        "w4a16_zeros": "Mixed GEMM, uint4 with zero points by bf16, groups of 128",
        "mxfp8": "Mixed GEMM, mxfp8 by bf16",
        "mxfp8_a8": "Mixed GEMM, mxfp8 by e4m3",
        "nvfp4": "Mixed GEMM, nvfp4 by bf16",
        "ternary_a8": "Mixed GEMM, ternary by int8, a scale per row",
        "ternary_a16": "Mixed GEMM, ternary by bf16, a scale per row",
        "w2a8": "Mixed GEMM, int2 by int8, groups of 128",
    },
    peers={**{name: called for name, (called, _) in MIXED.items()}, "dense": "torch.mm, bf16"},
    called={"torch, int4": "torch._weight_int4pack_mm", "torch.mm, bf16": "torch.mm (cuBLAS)"},
    absences={
        ": not for e4m3 activations": "does not support e4m3 activations",
        ": not for ": "not measured with weights of this format",
        "up to 512 rows": "measured with bf16 activations and up to 512 rows only",
    },
    axis=("M", "M, rows of the input"),
    divided="type",
)
