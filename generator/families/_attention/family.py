"""What the families of both passes share."""

from __future__ import annotations

from typing import Any, Generic

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator.families._attention.operation import Operation
from warploom.generator.families._attention.problem import AttentionProblem
from warploom.generator.families._attention.shape import (
    AttentionShape,
    cells,
    extents_of_cell,
    parse_shape,
)
from warploom.generator.families.family import Family
from warploom.generator.families.table import ScheduleT

OperationT = TypeVar("OperationT", bound=Operation, default=Any)
ProblemT = TypeVar("ProblemT", default=AttentionProblem)


class AttentionFamily(
    Family[OperationT, ScheduleT, AttentionShape, ProblemT],
    Generic[OperationT, ScheduleT, ProblemT],
):
    """A pass of attention: both have the same shapes."""

    shape = AttentionShape
    parse_shape = staticmethod(parse_shape)
    cells = staticmethod(cells)
    extents_of_cell = staticmethod(extents_of_cell)
