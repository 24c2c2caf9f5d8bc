"""Attention forward: o = softmax(scale q k^T) v, exact, on Hopper's TMA and wgmma."""

from __future__ import annotations

from warploom.generator.families._attention import AttentionProblem
from warploom.generator.families._attention.family import AttentionFamily
from warploom.generator.families.attention_forward.layout import AttentionLayout, attention_layout
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
    AttentionSpec,
)

__all__ = [
    "FAMILY",
    "AttentionOperation",
    "AttentionProblem",
    "AttentionSchedule",
    "attention_layout",
]


class AttentionForward(AttentionFamily[AttentionOperation, AttentionSchedule]):
    """The forward pass."""

    revision = 2  # since outputs are rescaled less often where that is `needed`

    def layout(self, spec: AttentionSpec) -> AttentionLayout:
        """Shared memory and registers: see layout.py."""
        return attention_layout(spec.architecture, spec.operation, spec.schedule)


FAMILY = AttentionForward()
