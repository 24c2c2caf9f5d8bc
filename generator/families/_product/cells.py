"""The shapes of products: as they are kept, written on a command line, and listed as cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from warploom.errors import ProblemError, UnknownNameError
from warploom.generator import configurations, models
from warploom.generator.shapes import Shape, extents_of


@dataclass(frozen=True, slots=True, order=True)
class ProductShape(Shape):
    """`batches` products of matrices, A [m, k] and a B or W of k and n."""

    calls: ClassVar[frozenset[str]] = frozenset({"m"})

    m: int
    n: int
    k: int
    batches: int = 1

    def __str__(self) -> str:
        """4096x6144x4096, and how many of them."""
        product = f"{self.m}x{self.n}x{self.k}"
        return product if self.batches == 1 else f"{self.batches} of {product}"

    @classmethod
    def parse(cls, text: str, *, batched: bool) -> Self:
        """The shape that `4096x6144x4096` is, of batched products `16x4096x6144x4096`.

        A single one may have its batches left out, as where it is printed.
        """
        sizes = ["m", "n", "k"]
        forms = [["batches", *sizes], sizes] if batched else [sizes]
        return cls(**extents_of(text, forms, "this product"))


def refuse_batches(shape: ProductShape, *, batched: bool) -> None:
    """Raise ProblemError for several products of an operation that computes one."""
    if shape.batches > 1 and not batched:
        raise ProblemError(
            f"shape {str(shape)!r}",
            rule="must be of one GEMM: the operation has neither batches nor groups",
            fix=f"write {shape.m}x{shape.n}x{shape.k}, or set the operation's batches or groups",
        )


def layers(model: str, *, biased: bool = False) -> list[tuple[int, int]]:
    """The weights [n, k] of a model's layers, however they are kept.

    `model` is of that list, or the path of a config.json, which also tells what layers are
    `biased`: only these are wanted. UnknownNameError for neither.
    """
    if models.is_path(model):
        return models.read(model).weights(biased=biased)
    listed = configurations.cells()["gemm"]
    known = listed["models"]
    if model not in known:
        raise UnknownNameError(
            f"model {model!r}",
            rule=f"benchmarks/cells.yaml has {', '.join(known)}",
            fix="name one of them, or give the path of a config.json, or --shapes",
        )
    return [tuple(listed["weights"][index]) for index in known[model]]
