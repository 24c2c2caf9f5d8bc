"""What the families of both passes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator.families._attention import shape
from warploom.generator.families._attention.operation import Operation
from warploom.generator.families._attention.problem import AttentionProblem
from warploom.generator.families._attention.shape import AttentionShape
from warploom.generator.families.family import Family
from warploom.generator.specification import Schedule

OperationT = TypeVar("OperationT", bound=Operation, default=Any)
ScheduleT = TypeVar("ScheduleT", bound=Schedule, default=Any)
ProblemT = TypeVar("ProblemT", default=AttentionProblem)


class AttentionFamily(
    Family[OperationT, ScheduleT, AttentionShape, ProblemT],
    Generic[OperationT, ScheduleT, ProblemT],
):
    """A pass of attention: both have the same shapes."""

    shape = AttentionShape

    def parse_shape(self, operation: OperationT, text: str) -> AttentionShape:
        """The shape that `text` is: see shape.py."""
        return shape.parse_shape(operation, text)

    def cells(
        self, operation: OperationT, model: str | None, rows: Sequence[int]
    ) -> list[AttentionShape]:
        """The cells of an operation: see shape.py."""
        return shape.cells(operation, model, rows)

    def extents_of_cell(self, problem: Mapping[str, Any]) -> dict[str, Any] | None:
        """The extents of the problem of a benchmark's result: see shape.py."""
        return shape.extents_of_cell(problem)
