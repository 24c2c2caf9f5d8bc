"""The extents of a call, and how its matrices lie."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.shapes import Shape


@dataclass(frozen=True, slots=True, order=True)
class CastShape(Shape):
    """m rows of n columns: all leading dimensions of x are rows."""

    m: int
    n: int


@dataclass(frozen=True, slots=True)
class CastProblem:
    """The extents of one call, and elements between neighbours of what it has.

    x_pitch, q_pitch, q_t_pitch, gradient_pitch   from row to row
    scale, scale_t                from block to block, down and across
    """

    m: int
    n: int
    x_pitch: int
    q_pitch: int
    scale: tuple[int, int]
    q_t_pitch: int = 0
    scale_t: tuple[int, int] = (0, 0)
    gradient_pitch: int = 0
