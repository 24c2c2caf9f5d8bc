"""The shape of a problem: the extents that decide how long it takes, whatever its memory layout.

Records are kept by shape, and the model predicts for it. Every field is an integer.
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass

from warploom.errors import UnknownNameError


@dataclass(frozen=True, slots=True, order=True)
class GemmShape:
    """`batches` products of A [m, k] and B [k, n]."""

    m: int
    n: int
    k: int
    batches: int = 1


@dataclass(frozen=True, slots=True, order=True)
class AttentionShape:
    """q [batch, heads, seq_q, dim] over k and v [batch, kv_heads, seq_k, dim].

    batch     of packed sequences: how many there are; seq_q and seq_k are then the longest
    window    columns that a row attends to at most; 0: as many as the mask leaves
    total_q   rows of all packed sequences together; 0 where lengths are fixed
    total_k   columns, likewise
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    dim: int
    window: int = 0
    total_q: int = 0
    total_k: int = 0

    @property
    def sharing(self) -> int:
        """Query heads of one kv head."""
        return self.heads // max(1, self.kv_heads)


Shape = GemmShape | AttentionShape

SHAPES: dict[str, type[GemmShape] | type[AttentionShape]] = {
    "gemm": GemmShape,
    "attention_forward": AttentionShape,
    "attention_backward": AttentionShape,
}


def shape_type(family: str) -> type[GemmShape] | type[AttentionShape]:
    """Return the shapes of a family, or raise UnknownNameError for one that is not tuned."""
    try:
        return SHAPES[family]
    except KeyError:
        raise UnknownNameError(
            f"family {family!r}", rule=f"shapes are known of {', '.join(SHAPES)}"
        ) from None


def text(shape: Shape) -> str:
    """Return a shape for people: 4096x6144x4096, or the extents that are not 0 by name."""
    if isinstance(shape, GemmShape):
        product = f"{shape.m}x{shape.n}x{shape.k}"
        return product if shape.batches == 1 else f"{shape.batches} of {product}"
    return " ".join(f"{name}{value}" for name, value in asdict(shape).items() if value)


def empty(shape: Shape) -> str:
    """The first extent that is not positive, of which nothing was measured; empty where all are."""
    optional = ("window", "total_q", "total_k")  # 0: there is none
    values = asdict(shape).items()
    return next((name for name, value in values if value < (name not in optional)), "")


def distance(one: Shape, other: Shape) -> float:
    """How far shapes are apart: the sum over extents of |log2| of their ratios.

    How many query heads share a kv head is an extent of its own, since schedules depend on it.
    Infinite where an extent differs by more than a factor of 4, or is 0 in one alone: what was
    measured there says nothing here.
    """
    total = 0.0
    for x, y in zip(_extents(one), _extents(other), strict=True):
        if x == y:
            continue
        if not (x and y) or max(x, y) > 4 * min(x, y):
            return math.inf
        total += abs(math.log2(x / y))
    return total


def _extents(shape: Shape) -> tuple[int, ...]:
    sharing = (shape.sharing,) if isinstance(shape, AttentionShape) else ()
    return (*astuple(shape), *sharing)
