"""The extents of a call, and how its matrices lie."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.shapes import Shape


@dataclass(frozen=True, slots=True, order=True)
class SparseGemmShape(Shape):
    """x [m, k] by W [n, k]: all leading dimensions of x are rows."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class SparseGemmProblem:
    """The extents of one call, and the elements from row to row of x and of y."""

    m: int
    n: int
    k: int
    x_pitch: int
    y_pitch: int
