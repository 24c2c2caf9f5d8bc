"""Which schedule a forward pass gets that nothing was tuned for."""

from __future__ import annotations

from warploom.generator.families._attention.table import AttentionTable
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
)


class AttentionForwardTable(AttentionTable[AttentionOperation, AttentionSchedule]):
    """The forward pass has no features of its own."""
