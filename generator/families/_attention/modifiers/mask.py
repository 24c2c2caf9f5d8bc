"""A mask: a boolean for each score, or one that several share; those of false do not count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from warploom.generator.families._attention.modifiers.modifier import Modifier, strides
from warploom.generator.families._attention.problem import AttentionProblem
from warploom.generator.launches import Workspace
from warploom.generator.parameters import Field, int32, pointer

FORWARD_REGISTERS, BACKWARD_REGISTERS, PACKED_REGISTERS = 32, 8, 16
KEYS_BYTES = 16  # of what is found of a row of a mask of keys


class Mask(Modifier):
    """Leave out scores, and tiles without any that counts."""

    name = "masked"
    doc = "a boolean tensor masks the scores: keys of false are not seen"
    place = 50
    hides = True
    trims = True

    def parameters(self) -> Sequence[Field[Any]]:
        def rows_of_batch(at: Any) -> int:  # noqa: ANN401 (a launch of either pass)
            batch, head, _ = at.problem.strides_mask
            return (at.problem.heads if head else 1) if batch else 0

        def rows_of_head(at: Any) -> int:  # noqa: ANN401
            return 1 if at.problem.strides_mask[1] else 0

        rows = "of the mask; 0: it is of pairs"
        found: list[Field[Any]] = [  # of a mask of keys, before its tiles are worked on
            pointer("keys", "int4", "[row of the mask]: see find_keys()"),
            int32("keys_rows", rows, lambda at: _rows_of_keys(at.problem)),
            int32("keys_columns", "of the mask", lambda at: at.problem.seq_k),
            int32("keys_batch", "rows of a batch; 0: all have the same", rows_of_batch),
            int32("keys_head", "rows of a head; 0: all have the same", rows_of_head),
        ]
        return [
            pointer("shown", "const uint8_t", "as bias, by strides", tensor="mask"),
            *strides("shown", lambda problem: problem.strides_mask),
            *(found if self.operation.trims else ()),
        ]

    def workspaces(self, problem: AttentionProblem) -> Sequence[Workspace]:
        rows = max(1, _rows_of_keys(problem))
        return [Workspace("keys", KEYS_BYTES * rows)] if self.operation.trims else []

    def key_rows(self, problem: AttentionProblem) -> int:
        return _rows_of_keys(problem) if self.operation.trims else 0

    @property
    def staged_bytes(self) -> int:
        return 1

    def forward_score_registers(self) -> int:
        return FORWARD_REGISTERS

    def backward_score_registers(self) -> int:
        packed = bool(self.operation.lengths == "packed")
        return BACKWARD_REGISTERS + packed * PACKED_REGISTERS


def _rows_of_keys(problem: AttentionProblem) -> int:
    """How many rows a mask of keys has, which all rows of q have in common; 0: it is of pairs."""
    batch, head, row = problem.strides_mask
    return (problem.batch if batch else 1) * (problem.heads if head else 1) if row == 0 else 0
