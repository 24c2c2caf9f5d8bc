"""The extents of a call, and how its matrices lie."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.shapes import Shape


@dataclass(frozen=True, slots=True, order=True)
class ActivationBackwardShape(Shape):
    """m rows of n columns: all leading dimensions of dy are rows."""

    m: int
    n: int


@dataclass(frozen=True, slots=True)
class ActivationBackwardProblem:
    """The extents of one call, and the elements from row to row of each matrix that it has."""

    m: int
    n: int
    pitch_dy: int
    pitch_z: int = 0
    pitch_dz: int = 0
