"""What the families of both passes share."""

from __future__ import annotations

from typing import Generic

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator import rules
from warploom.generator.families._attention.problem import AttentionProblem
from warploom.generator.families._attention.shape import (
    AttentionShape,
    cells,
    extents_of_cell,
    parse_shape,
)
from warploom.generator.families._attention.table import AttentionTable, OperationT
from warploom.generator.families.family import Family
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
    cells = staticmethod(cells)
    extents_of_cell = staticmethod(extents_of_cell)

    def operation_reasons(self, operation: OperationT) -> list[str]:
        """Lists of blocks say all of what attends to what."""
        return rules.broken(
            [
                None
                if operation.mask == "none" or not operation.blocks
                else f"mask {operation.mask} with blocks: lists and their masks say which scores "
                "count; take none, and hide the rest in mask_mod",
                None
                if operation.lengths == "fixed" or not operation.blocks
                else "lengths packed with blocks: lists are of one length; take fixed, and a "
                "mask_mod that tells sequences apart",
                None
                if operation.sinks == "none" or not operation.blocks
                else f"sinks {operation.sinks} with blocks: no kernel has both; take none",
                None
                if not (operation.scored and operation.blocks)
                else "alibi, bias or masked with blocks: no kernel has both; hide scores in "
                "mask_mod, or leave out blocks",
            ]
        )
