"""d = alpha x + y: the smallest family that there can be, for tests and as an example."""

from __future__ import annotations

from warploom.generator.families.axpy import launch, model, rules
from warploom.generator.families.axpy.schedule import AxpyOperation, AxpySchedule
from warploom.generator.families.axpy.shape import AxpyShape
from warploom.generator.families.family import Family
from warploom.generator.families.table import Table

__all__ = ["FAMILY", "AxpyOperation", "AxpySchedule", "AxpyShape"]


class AxpyTable(Table[AxpyOperation, AxpySchedule, AxpyShape]):
    """What is said of any family holds: the first schedule of a call's class is its own."""


class Axpy(Family[AxpyOperation, AxpySchedule, AxpyShape, AxpyShape]):
    """Sums of two vectors, one of them scaled."""

    operation = AxpyOperation
    schedule = AxpySchedule
    shape = AxpyShape
    constants = model.START
    table = AxpyTable()

    schedule_reasons = staticmethod(rules.schedule_reasons)
    complete = staticmethod(rules.complete)
    parameters = staticmethod(launch.parameters)
    launches = staticmethod(launch.launches)
    seconds = staticmethod(model.seconds)


FAMILY = Axpy()
