"""Values in 8 bits with scales of tensors, rows or blocks; of a matrix and of its transpose."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families.cast import launch, model, rules
from warploom.generator.families.cast.layout import CastLayout
from warploom.generator.families.cast.schedule import (
    COLUMNS,
    VALUES,
    CastOperation,
    CastSchedule,
    CastSpec,
)
from warploom.generator.families.cast.shape import CastProblem, CastShape
from warploom.generator.families.family import Family
from warploom.generator.families.table import Table

__all__ = ["FAMILY", "CastOperation", "CastProblem", "CastSchedule", "CastShape"]


class CastTable(Table[CastOperation, CastSchedule, CastShape]):
    """The first schedule of a call's class is its own."""

    def features(self, operation: CastOperation, shape: CastShape) -> dict[str, int | str]:
        """The fields of operation and shape, and which kernel the operation is."""
        return {**super().features(operation, shape), "body": operation.body}


class Cast(Family[CastOperation, CastSchedule, CastShape, CastProblem]):
    """Quantization."""

    operation = CastOperation
    schedule = CastSchedule
    shape = CastShape
    constants = model.START
    table = CastTable()

    operation_reasons = staticmethod(rules.operation_reasons)
    schedule_reasons = staticmethod(rules.schedule_reasons)
    parameters = staticmethod(launch.parameters)
    launches = staticmethod(launch.launches)
    workspaces = staticmethod(launch.workspaces)
    seconds = staticmethod(model.seconds)

    def layout(self, spec: CastSpec) -> CastLayout:
        """The shared memory of tiles."""
        return CastLayout(spec.operation)

    def context(self, spec: CastSpec) -> dict[str, Any]:
        """The element of x, and the sizes that the schedule does not say."""
        return {
            "x": element(spec.operation.x),
            "values": VALUES,
            "columns": COLUMNS,
            "amax_vectors": launch.AMAX_VECTORS,
        }


FAMILY = Cast()
