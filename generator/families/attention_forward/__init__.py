"""Attention forward: o = softmax(scale q k^T) v, exact, on Hopper's TMA and wgmma."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warploom.generator.architectures import Architecture
from warploom.generator.families._attention import AttentionProblem, AttentionShape
from warploom.generator.families._attention.family import AttentionFamily
from warploom.generator.families.attention_forward import launch, model, rules, template
from warploom.generator.families.attention_forward.layout import AttentionLayout, attention_layout
from warploom.generator.families.attention_forward.parameters import parameters, q_tiles
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
    AttentionSpec,
)
from warploom.generator.families.attention_forward.table import AttentionForwardTable
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.parameters import ParameterBlock

__all__ = [
    "FAMILY",
    "AttentionLayout",
    "AttentionOperation",
    "AttentionProblem",
    "AttentionSchedule",
    "AttentionSpec",
    "attention_layout",
    "q_tiles",
]


class AttentionForward(AttentionFamily[AttentionOperation, AttentionSchedule]):
    """The forward pass."""

    operation = AttentionOperation
    schedule = AttentionSchedule
    constants = model.START
    table = AttentionForwardTable()
    revision = 2  # since outputs are rescaled less often where that is `needed`

    def schedule_reasons(
        self, arch: Architecture, operation: AttentionOperation, schedule: AttentionSchedule
    ) -> list[str]:
        """Why the schedule does not fit the operation on `arch`; empty when it does."""
        return rules.schedule_reasons(arch, operation, schedule)

    def layout(self, spec: AttentionSpec) -> AttentionLayout:
        """Shared memory and registers: see layout.py."""
        return attention_layout(spec.architecture, spec.operation, spec.schedule)

    def parameters(self, spec: AttentionSpec) -> ParameterBlock[Any]:
        """The parameter block of the spec's kernels."""
        return parameters(spec)

    def context(self, spec: AttentionSpec) -> dict[str, Any]:
        """What the template is rendered with: see template.py."""
        return template.context(spec)

    def launches(
        self, spec: AttentionSpec, problem: AttentionProblem, device: DeviceLimits
    ) -> list[Launch]:
        """The kernel launches of one call: see launch.py."""
        return launch.launches(spec, problem, device)

    def workspaces(self, spec: AttentionSpec, problem: AttentionProblem) -> list[Workspace]:
        """The buffers of one call: see launch.py."""
        return launch.workspaces(spec, problem)

    def seconds(
        self,
        constants: Mapping[str, float],
        operation: AttentionOperation,
        schedule: AttentionSchedule,
        shape: AttentionShape,
        multiprocessors: int,
    ) -> float:
        """The seconds that one call should take: see model.py."""
        return model.seconds(constants, operation, schedule, shape, multiprocessors)


FAMILY = AttentionForward()
