"""Two partial results of attention over different keys as the one over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warploom.generator.elements import element
from warploom.generator.families.attention_merge import launch, model, rules
from warploom.generator.families.attention_merge.schedule import (
    VALUES,
    AttentionMergeOperation,
    AttentionMergeSchedule,
    AttentionMergeSpec,
)
from warploom.generator.families.attention_merge.shape import (
    AttentionMergeProblem,
    AttentionMergeShape,
)
from warploom.generator.families.family import Family
from warploom.generator.families.table import Table

__all__ = [
    "FAMILY",
    "AttentionMergeOperation",
    "AttentionMergeProblem",
    "AttentionMergeSchedule",
    "AttentionMergeShape",
]


class AttentionMergeTable(
    Table[AttentionMergeOperation, AttentionMergeSchedule, AttentionMergeShape]
):
    """The first schedule of a call's class is its own."""


class AttentionMerge(
    Family[
        AttentionMergeOperation,
        AttentionMergeSchedule,
        AttentionMergeShape,
        AttentionMergeProblem,
    ]
):
    """Partial results of attention, merged."""

    operation = AttentionMergeOperation
    schedule = AttentionMergeSchedule
    shape = AttentionMergeShape
    constants = model.START
    table = AttentionMergeTable()

    operation_reasons = staticmethod(rules.operation_reasons)
    schedule_reasons = staticmethod(rules.schedule_reasons)
    parameters = staticmethod(launch.parameters)
    launches = staticmethod(launch.launches)
    seconds = staticmethod(model.seconds)

    def complete(
        self, arch: str, operation: AttentionMergeOperation, fields: Mapping[str, Any]
    ) -> AttentionMergeSchedule:
        """`lanes: auto`: as many as a row has vectors, rounded up; at most a warp."""
        return rules.complete(operation, fields)

    def context(self, spec: AttentionMergeSpec) -> dict[str, Any]:
        """The elements of the three tensors, and the sizes that follow from the schedule."""
        operation: AttentionMergeOperation = spec.operation
        return {
            "elements": [(name, element(getattr(operation, name))) for name in ("a", "b", "out")],
            "values": VALUES,
            "vectors": rules.vectors(operation, spec.schedule),
        }


FAMILY = AttentionMerge()
