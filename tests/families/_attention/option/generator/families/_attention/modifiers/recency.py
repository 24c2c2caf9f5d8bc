"""A toy: later columns score more, by a rate of each query head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from warploom.generator.families._attention.modifiers.modifier import Modifier
from warploom.generator.parameters import Field, pointer


class Recency(Modifier):
    """Add rate * column."""

    name = "recency"
    doc = "rate * column is added to scores, by rates of heads"
    place = 35
    adds = True
    placed = True

    def parameters(self) -> Sequence[Field[Any]]:
        return [pointer("recency", "const float", "[heads]")]

    def forward_score_registers(self) -> int:
        return 4

    def formula(self, score: str) -> str:
        return f"{score} + rate column"

    def added(self, score: str) -> str:
        return f"fmaf(rate, first_column + column_of(i), {score})"

    def added_again(self, score: str) -> str:
        return f"fmaf(rate, column, {score})"
