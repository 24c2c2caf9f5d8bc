"""dz = dy * f'(z) of an activation f, and the sums of the columns of dz: a bias's gradient."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.epilogue import derivative_class, derivative_parts
from warploom.generator.families.activation_backward import launch, model, rules
from warploom.generator.families.activation_backward.schedule import (
    VALUES,
    ActivationBackwardOperation,
    ActivationBackwardSchedule,
    ActivationBackwardSpec,
)
from warploom.generator.families.activation_backward.shape import (
    ActivationBackwardProblem,
    ActivationBackwardShape,
)
from warploom.generator.families.family import Family
from warploom.generator.families.table import Table

__all__ = [
    "FAMILY",
    "ActivationBackwardOperation",
    "ActivationBackwardProblem",
    "ActivationBackwardSchedule",
    "ActivationBackwardShape",
]


class ActivationBackwardTable(
    Table[ActivationBackwardOperation, ActivationBackwardSchedule, ActivationBackwardShape]
):
    """The first schedule of a call's class that is legal for its types is its own."""


class ActivationBackward(
    Family[
        ActivationBackwardOperation,
        ActivationBackwardSchedule,
        ActivationBackwardShape,
        ActivationBackwardProblem,
    ]
):
    """The gradient of an activation."""

    operation = ActivationBackwardOperation
    schedule = ActivationBackwardSchedule
    shape = ActivationBackwardShape
    constants = model.START
    table = ActivationBackwardTable()

    operation_reasons = staticmethod(rules.operation_reasons)
    schedule_reasons = staticmethod(rules.schedule_reasons)
    parameters = staticmethod(launch.parameters)
    launches = staticmethod(launch.launches)
    workspaces = staticmethod(launch.workspaces)
    seconds = staticmethod(model.seconds)

    def context(self, spec: ActivationBackwardSpec) -> dict[str, Any]:
        """The elements of the matrices, and the sizes of blocks that the schedule does not say."""
        operation = spec.operation
        found: dict[str, Any] = {
            "elements": [(name, element(getattr(operation, name))) for name in operation.tensors],
            "values": VALUES,
            "sum_threads": launch.SUM_THREADS,
            "sum_columns": launch.SUM_COLUMNS,
        }
        if operation.function != "none":
            found["parts"] = derivative_parts(operation.function)
            found["derivative"] = derivative_class(operation.function)
        return found


FAMILY = ActivationBackward()
