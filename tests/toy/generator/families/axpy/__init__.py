"""d = alpha x + y: the smallest family that there can be, for tests and as an example."""

from __future__ import annotations

from warploom.generator.families.axpy.schedule import AxpyOperation, AxpySchedule
from warploom.generator.families.axpy.shape import AxpyShape
from warploom.generator.families.base import Family

__all__ = ["FAMILY", "AxpyOperation", "AxpySchedule", "AxpyShape"]


class Axpy(Family[AxpyOperation, AxpySchedule, AxpyShape, AxpyShape]):
    """Sums of two vectors, one of them scaled."""


FAMILY = Axpy()
