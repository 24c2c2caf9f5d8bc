"""Attention backward: dq, dk and dv by recomputation, on Hopper's TMA and wgmma."""

from __future__ import annotations

from warploom.generator.families._attention.family import AttentionFamily
from warploom.generator.families.attention_backward.layout import (
    AttentionBackwardLayout,
    attention_backward_layout,
)
from warploom.generator.families.attention_backward.problem import AttentionBackwardProblem
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
    AttentionBackwardSpec,
)
from warploom.generator.families.attention_backward.template import COARSE_LSE

__all__ = [
    "COARSE_LSE",
    "FAMILY",
    "AttentionBackwardOperation",
    "AttentionBackwardProblem",
    "AttentionBackwardSchedule",
    "attention_backward_layout",
]


class AttentionBackward(
    AttentionFamily[AttentionBackwardOperation, AttentionBackwardSchedule, AttentionBackwardProblem]
):
    """The backward pass."""

    def layout(self, spec: AttentionBackwardSpec) -> AttentionBackwardLayout:
        """Shared memory and registers: see layout.py."""
        return attention_backward_layout(spec.architecture, spec.operation, spec.schedule)


FAMILY = AttentionBackward()
