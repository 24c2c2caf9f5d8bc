"""ALiBi: scores fall with the distance from the diagonal, by a slope of each query head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from warploom.generator.families._attention.modifiers.modifier import Modifier
from warploom.generator.parameters import Field, int64, pointer

FORWARD_REGISTERS = 4
CAPPED_REGISTERS = 16  # of the backward pass, where scores are capped


class Alibi(Modifier):
    """Add -slope abs(row + seq_k - seq_q - column), by slopes of heads."""

    name = "alibi"
    doc = "add -slope * abs(row + seq_k - seq_q - column) to the scores, with a slope for each head"
    place = 30
    feature = True
    adds = True
    placed = True
    leans = True

    def parameters(self) -> Sequence[Field[Any]]:
        return [
            pointer("alibi_slopes", "const float", "[batch, heads], by the stride of batches"),
            int64("alibi_batch", "elements", lambda at: at.problem.alibi_batch),
        ]

    def forward_score_registers(self) -> int:
        return FORWARD_REGISTERS

    def backward_score_registers(self) -> int:
        return CAPPED_REGISTERS if self.operation.caps else 0

    def added(self, score: str) -> str:
        return f"fmaf(slope, fabsf(distance + (row_of(i) - column_of(i))), {score})"

    def added_again(self, score: str) -> str:
        return f"fmaf(slope, fabsf(float(row[r] + columns - rows - column)), {score})"
