"""Which schedule a backward pass gets that nothing was tuned for."""

from __future__ import annotations

from dataclasses import replace

from warploom.generator.families._attention.shape import AttentionShape
from warploom.generator.families._attention.table import AttentionTable
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.table import Feature


class AttentionBackwardTable(AttentionTable[AttentionBackwardOperation, AttentionBackwardSchedule]):
    """Gradients may have to be bit-equal, and blocks may share out the heads of a kv head."""

    unsuited = (
        "blocks of a cluster share out the query heads of a kv head, of which there is one",
        "add schedules with cluster: 1",
    )

    def features(
        self, operation: AttentionBackwardOperation, shape: AttentionShape
    ) -> dict[str, Feature]:
        """Those of attention, and whether gradients are deterministic."""
        found = super().features(operation, shape)
        return {**found, "deterministic": operation.deterministic}

    def modelled(self, operation: AttentionBackwardOperation) -> bool:
        """No sweep had sums in a fixed order either."""
        return super().modelled(operation) and not operation.deterministic

    def suits(self, schedule: AttentionBackwardSchedule, shape: AttentionShape) -> bool:
        """A cluster is legal with any heads, but has nothing to share out of a single one."""
        return shape.sharing > 1 or schedule.cluster == 1

    def serves(self, have: AttentionBackwardOperation, wanted: AttentionBackwardOperation) -> bool:
        """A deterministic kernel also computes what need not be."""
        wider = replace(wanted, deterministic=wanted.deterministic or have.deterministic)
        if wanted.dim_v and not have.dim_v:  # which takes all tensors to have one dimension
            return False
        return super().serves(have, wider)
