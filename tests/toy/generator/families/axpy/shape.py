"""What decides how long a call takes, and all that a launch needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.shapes import Shape


@dataclass(frozen=True, slots=True, order=True)
class AxpyShape(Shape):
    """Vectors of n elements."""

    n: int
