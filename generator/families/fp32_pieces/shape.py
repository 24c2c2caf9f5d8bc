"""The dimensions of a call, and how its matrices are stored."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.shapes import Shape


@dataclass(frozen=True, slots=True, order=True)
class Fp32PiecesShape(Shape):
    """m rows of k columns: all leading dimensions of x are rows."""

    m: int
    k: int


@dataclass(frozen=True, slots=True)
class Fp32PiecesProblem:
    """The dimensions of one call.

    x_pitch    elements between rows of x, of columns where these are contiguous
    place      elements from a piece to the next in a row of q: k, padded to 64
    """

    m: int
    k: int
    x_pitch: int
    place: int
