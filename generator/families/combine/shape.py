"""The extents of a call, and how its tensors lie."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.shapes import Shape


@dataclass(frozen=True, slots=True, order=True)
class CombineShape(Shape):
    """Tokens, rows of each, and their columns."""

    tokens: int
    k: int
    columns: int


@dataclass(frozen=True, slots=True)
class CombineProblem:
    """The extents of one call, and elements from row to row of what it has.

    rows      of all experts; what is no row of these counts as skipped
    weights   steps of weights from token to token, and from one choice of a token to the next
    combined  of the rows that were combined, where there are weights' gradients
    experts   in the offsets whose last one ends the rows; 0 where there are no offsets
    """

    tokens: int
    k: int
    columns: int
    rows: int
    tokens_pitch: int
    rows_pitch: int
    weights: tuple[int, int] = (0, 0)
    combined_pitch: int = 0
    experts: int = 0
