"""New keys and values written into caches: rotated and quantised on their way, queries rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.generator.elements import element
from warploom.generator.families.attention_append import launch, model, rules
from warploom.generator.families.attention_append.problem import (
    AttentionAppendProblem,
    AttentionAppendShape,
    cells,
)
from warploom.generator.families.attention_append.schedule import (
    VALUES,
    AttentionAppendOperation,
    AttentionAppendSchedule,
    AttentionAppendSpec,
)
from warploom.generator.families.family import Family
from warploom.generator.families.table import Table
from warploom.generator.models import Model

__all__ = [
    "FAMILY",
    "AttentionAppendOperation",
    "AttentionAppendProblem",
    "AttentionAppendSchedule",
    "AttentionAppendShape",
]


class AttentionAppendTable(
    Table[AttentionAppendOperation, AttentionAppendSchedule, AttentionAppendShape]
):
    """The first schedule of a call's class is its own."""


class AttentionAppend(
    Family[
        AttentionAppendOperation,
        AttentionAppendSchedule,
        AttentionAppendShape,
        AttentionAppendProblem,
    ]
):
    """Keys and values appended to caches."""

    operation = AttentionAppendOperation
    schedule = AttentionAppendSchedule
    shape = AttentionAppendShape
    constants = model.START
    table = AttentionAppendTable()

    operation_reasons = staticmethod(rules.operation_reasons)
    schedule_reasons = staticmethod(rules.schedule_reasons)
    parameters = staticmethod(launch.parameters)
    launches = staticmethod(launch.launches)
    cells = staticmethod(cells)

    def of_model(
        self, operation: AttentionAppendOperation, model: Model
    ) -> list[AttentionAppendOperation]:
        """In the model's type, of its heads' dimension."""
        return [replace(operation, element=model.element, dim=model.dim)]

    seconds = staticmethod(model.seconds)

    def context(self, spec: AttentionAppendSpec) -> dict[str, Any]:
        """The element types, and the sizes that follow from the operation."""
        operation: AttentionAppendOperation = spec.operation
        return {
            "element": element(operation.element),
            "cached": element(operation.cached),
            "angle": element(operation.angle),
            "values": VALUES,
            "lanes": operation.lanes,
            "largest": {"e4m3": "448.f", "int8": "127.f"}.get(operation.cache, ""),
        }


FAMILY = AttentionAppend()
