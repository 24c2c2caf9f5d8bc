"""Rows of experts summed for each token, and tokens copied to the rows of their experts."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families.base import Family
from warploom.generator.families.combine.schedule import (
    LOADS,
    VALUES,
    CombineOperation,
    CombineProblem,
    CombineSchedule,
    CombineShape,
    CombineSpec,
)

__all__ = ["FAMILY", "CombineOperation", "CombineProblem", "CombineSchedule", "CombineShape"]


class Combine(Family[CombineOperation, CombineSchedule, CombineShape, CombineProblem]):
    """Between the order of tokens and that of experts."""

    def context(self, spec: CombineSpec) -> dict[str, Any]:
        """The elements of values and weights, and what a thread moves at once."""
        weights = spec.operation.weights
        return {
            "parts": _options(spec.operation),
            "value": element(spec.operation.values),
            "weight": None if weights == "none" else element(weights),
            "count": VALUES,
            "loads": LOADS,
        }


def _options(operation: CombineOperation) -> list[str]:
    """The files of a kernel's direction and options, in the order in which hooks include them."""
    applies = {"weights": operation.weights != "none", "dot": operation.dot}
    names = [operation.direction, *(name for name, has in applies.items() if has)]
    return [f"combine/{name}.cuh.jinja" for name in names]


FAMILY = Combine()
