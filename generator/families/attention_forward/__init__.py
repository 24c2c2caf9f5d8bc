"""Attention forward: o = softmax(scale q k^T) v, exact, on Hopper's TMA and wgmma."""

from __future__ import annotations

from warploom.generator.families._attention import AttentionProblem
from warploom.generator.families._attention.family import AttentionFamily
from warploom.generator.families._attention.table import AttentionTable
from warploom.generator.families.attention_forward import launch, model, rules, template
from warploom.generator.families.attention_forward.layout import AttentionLayout, attention_layout
from warploom.generator.families.attention_forward.parameters import parameters
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


class AttentionForwardTable(AttentionTable[AttentionOperation, AttentionSchedule]):
    """Which schedule a forward pass gets that nothing was tuned for."""


class AttentionForward(AttentionFamily[AttentionOperation, AttentionSchedule]):
    """The forward pass."""

    operation = AttentionOperation
    schedule = AttentionSchedule
    constants = model.START
    table = AttentionForwardTable()
    revision = 2  # since outputs are rescaled less often where that is `needed`
    schedule_reasons = staticmethod(rules.schedule_reasons)
    parameters = staticmethod(parameters)
    context = staticmethod(template.context)
    launches = staticmethod(launch.launches)
    workspaces = staticmethod(launch.workspaces)
    seconds = staticmethod(model.seconds)

    def layout(self, spec: AttentionSpec) -> AttentionLayout:
        """Shared memory and registers: see layout.py."""
        return attention_layout(spec.architecture, spec.operation, spec.schedule)


FAMILY = AttentionForward()
