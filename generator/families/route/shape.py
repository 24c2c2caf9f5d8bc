"""The extents of a call, and how its ids lie."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.shapes import Shape


@dataclass(frozen=True, slots=True, order=True)
class RouteShape(Shape):
    """Tokens, the experts that each chose, and the experts that there are."""

    tokens: int
    k: int
    experts: int


@dataclass(frozen=True, slots=True)
class RouteProblem:
    """The extents of one call, and where its ids lie.

    first   the id of the first of the experts
    steps   elements of ids from token to token, and from one choice of a token to the next
    """

    tokens: int
    k: int
    experts: int
    first: int
    steps: tuple[int, int]

    @property
    def pairs(self) -> int:
        """Of a token and an expert that it chose."""
        return self.tokens * self.k
