"""The extents of a call, and how its tensors lie."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.shapes import Shape

Steps = tuple[int, int, int]  # elements from one row to the next, along each of three dimensions


@dataclass(frozen=True, slots=True, order=True)
class AttentionMergeShape(Shape):
    """Rows: of all batches and heads."""

    rows: int


@dataclass(frozen=True, slots=True)
class AttentionMergeProblem:
    """The extents of one call, and where its rows lie.

    extents   three of them, whose product is the rows; leading ones are 1 where there are fewer
    steps     of each tensor along these: out_a, out_b, out, and of their log-sum-exps
    """

    extents: Steps
    steps_a: Steps
    steps_b: Steps
    steps_out: Steps
    steps_lse_a: Steps
    steps_lse_b: Steps
    steps_lse: Steps

    @property
    def rows(self) -> int:
        """Of all three dimensions."""
        first, second, third = self.extents
        return first * second * third
