"""The extents of a call, and how its matrices lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warploom.generator import configurations
from warploom.generator.families._product.cells import layers
from warploom.generator.families.sparse_gemm.schedule import SparseGemmOperation
from warploom.generator.shapes import Shape


@dataclass(frozen=True, slots=True, order=True)
class SparseGemmShape(Shape):
    """x [m, k] by W [n, k]: all leading dimensions of x are rows."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class SparseGemmProblem:
    """The extents of one call, and the elements from row to row of x and of y.

    `x_scales` and `weight_scales` are how many scales there are: one, or one for each row.
    """

    m: int
    n: int
    k: int
    x_pitch: int
    y_pitch: int
    x_scales: int = 0
    weight_scales: int = 0


def cells(
    operation: SparseGemmOperation, model: str | None, rows: Sequence[int]
) -> list[SparseGemmShape]:
    """The weights of a model, or those that are measured."""
    listed = configurations.cells()["sparse_gemm"]
    weights = layers(model) if model else listed["weights"]
    return [SparseGemmShape(m, n, k) for n, k in weights for m in rows or listed["m"]]
