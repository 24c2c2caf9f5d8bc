"""Two partial results of attention over different keys as the one over all of them."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families.attention_merge.schedule import (
    VALUES,
    AttentionMergeOperation,
    AttentionMergeProblem,
    AttentionMergeSchedule,
    AttentionMergeShape,
    AttentionMergeSpec,
    vectors,
)
from warploom.generator.families.base import Family

__all__ = [
    "FAMILY",
    "AttentionMergeOperation",
    "AttentionMergeProblem",
    "AttentionMergeSchedule",
    "AttentionMergeShape",
]


class AttentionMerge(
    Family[
        AttentionMergeOperation,
        AttentionMergeSchedule,
        AttentionMergeShape,
        AttentionMergeProblem,
    ]
):
    """Partial results of attention, merged."""

    def context(self, spec: AttentionMergeSpec) -> dict[str, Any]:
        """The elements of the three tensors, and the sizes that follow from the schedule."""
        operation: AttentionMergeOperation = spec.operation
        return {
            "elements": [(name, element(getattr(operation, name))) for name in ("a", "b", "out")],
            "values": VALUES,
            "vectors": vectors(operation, spec.schedule),
        }


FAMILY = AttentionMerge()
