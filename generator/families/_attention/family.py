"""What the families of both passes share."""

from __future__ import annotations

from typing import Generic

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator import rules
from warploom.generator.families._attention.operation import GRADIENT_DIMS
from warploom.generator.families._attention.problem import AttentionProblem
from warploom.generator.families._attention.shape import (
    AttentionShape,
    cells,
    extents_of_cell,
    parse_shape,
    refuse_shape,
)
from warploom.generator.families._attention.table import AttentionTable, OperationT
from warploom.generator.families.base import Family
from warploom.generator.families.table import ScheduleT

ProblemT = TypeVar("ProblemT", default=AttentionProblem)


class AttentionFamily(
    Family[OperationT, ScheduleT, AttentionShape, ProblemT],
    Generic[OperationT, ScheduleT, ProblemT],
):
    """A pass of attention: both have the same shapes."""

    shape = AttentionShape
    table_type = AttentionTable
    parse_shape = staticmethod(parse_shape)
    refuse_shape = staticmethod(refuse_shape)
    cells = staticmethod(cells)
    extents_of_cell = staticmethod(extents_of_cell)

    def operation_reasons(self, operation: OperationT) -> list[str]:
        """Why modifiers or dimensions do not go with each other, or with masks and lengths."""
        broken = rules.broken([one for has in operation.modifiers for one in has.reasons()])
        return broken + operation.reasons_of_dims(GRADIENT_DIMS) if operation.dim_v else broken
