"""Attention backward: dq, dk and dv by recomputation, on Hopper's TMA and wgmma."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warploom.generator.architectures import Architecture
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families._attention.family import AttentionFamily
from warploom.generator.families.attention_backward import launch, model, rules, template
from warploom.generator.families.attention_backward.layout import (
    AttentionBackwardLayout,
    attention_backward_layout,
)
from warploom.generator.families.attention_backward.parameters import parameters
from warploom.generator.families.attention_backward.problem import AttentionBackwardProblem
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
    AttentionBackwardSpec,
)
from warploom.generator.families.attention_backward.table import AttentionBackwardTable
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.parameters import ParameterBlock

__all__ = [
    "FAMILY",
    "AttentionBackwardLayout",
    "AttentionBackwardOperation",
    "AttentionBackwardProblem",
    "AttentionBackwardSchedule",
    "AttentionBackwardSpec",
    "attention_backward_layout",
]


class AttentionBackward(
    AttentionFamily[AttentionBackwardOperation, AttentionBackwardSchedule, AttentionBackwardProblem]
):
    """The backward pass."""

    operation = AttentionBackwardOperation
    schedule = AttentionBackwardSchedule
    constants = model.START
    table = AttentionBackwardTable()

    def schedule_reasons(
        self,
        arch: Architecture,
        operation: AttentionBackwardOperation,
        schedule: AttentionBackwardSchedule,
    ) -> list[str]:
        """Why the schedule does not fit the operation on `arch`; empty when it does."""
        return rules.schedule_reasons(arch, operation, schedule)

    def layout(self, spec: AttentionBackwardSpec) -> AttentionBackwardLayout:
        """Shared memory and registers: see layout.py."""
        return attention_backward_layout(spec.architecture, spec.operation, spec.schedule)

    def parameters(self, spec: AttentionBackwardSpec) -> ParameterBlock[Any]:
        """The parameter block of the spec's kernels."""
        return parameters(spec)

    def context(self, spec: AttentionBackwardSpec) -> dict[str, Any]:
        """What the template is rendered with: see template.py."""
        return template.context(spec)

    def launches(
        self, spec: AttentionBackwardSpec, problem: AttentionBackwardProblem, device: DeviceLimits
    ) -> list[Launch]:
        """The kernel launches of one call: see launch.py."""
        return launch.launches(spec, problem, device)

    def workspaces(
        self, spec: AttentionBackwardSpec, problem: AttentionBackwardProblem
    ) -> list[Workspace]:
        """The buffers of one call: see launch.py."""
        return launch.workspaces(spec, problem)

    def seconds(
        self,
        constants: Mapping[str, float],
        operation: AttentionBackwardOperation,
        schedule: AttentionBackwardSchedule,
        shape: AttentionShape,
        multiprocessors: int,
    ) -> float:
        """The seconds that one call should take: see model.py."""
        return model.seconds(constants, operation, schedule, shape, multiprocessors)


FAMILY = AttentionBackward()
