"""dz = dy * f'(z) of an activation f, and the sums of the columns of dz: a bias's gradient."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.epilogue import derivative_class, derivative_parts
from warploom.generator.families.activation_backward import launch
from warploom.generator.families.activation_backward.schedule import (
    VALUES,
    ActivationBackwardOperation,
    ActivationBackwardProblem,
    ActivationBackwardSchedule,
    ActivationBackwardShape,
    ActivationBackwardSpec,
)
from warploom.generator.families.base import Family

__all__ = [
    "FAMILY",
    "ActivationBackwardOperation",
    "ActivationBackwardProblem",
    "ActivationBackwardSchedule",
    "ActivationBackwardShape",
]


class ActivationBackward(
    Family[
        ActivationBackwardOperation,
        ActivationBackwardSchedule,
        ActivationBackwardShape,
        ActivationBackwardProblem,
    ]
):
    """The gradient of an activation."""

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
