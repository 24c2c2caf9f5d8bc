"""The surface that every kernel family has: its dataclasses, its template, pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.parameters import ParameterBlock
from warploom.generator.specification import KernelSpec, Operation, Schedule

OperationT = TypeVar("OperationT", bound=Operation)
ScheduleT = TypeVar("ScheduleT", bound=Schedule)
ProblemT = TypeVar("ProblemT")


@dataclass(frozen=True)
class Family(Generic[OperationT, ScheduleT, ProblemT]):
    """One family. Reasons say why something is not legal: none of them when it is.

    operation, schedule   frozen dataclasses: their fields are the configuration's too
    automatic             fields of the schedule that may be `auto`: `complete` resolves them
    context               what the template is rendered with, beside the spec
    launches              the kernel launches of one call; `workspaces` the buffers they need
    revision              raised when a template's performance changes: records of an older one
                          are hints
    """

    name: str
    template: str
    operation: type[OperationT]
    schedule: type[ScheduleT]
    automatic: tuple[str, ...]
    operation_reasons: Callable[[OperationT], list[str]]
    schedule_reasons: Callable[[Architecture, OperationT, ScheduleT], list[str]]
    complete: Callable[[str, OperationT, Mapping[str, Any]], ScheduleT]
    parse_name: Callable[[str], KernelSpec | None]
    parameters: Callable[[KernelSpec], ParameterBlock]
    context: Callable[[KernelSpec], dict[str, Any]]
    launches: Callable[[KernelSpec, ProblemT, DeviceLimits], list[Launch]]
    workspaces: Callable[[KernelSpec, ProblemT], list[Workspace]]
    revision: int = 1

    def reasons(self, arch: Architecture, operation: OperationT, schedule: ScheduleT) -> list[str]:
        """Why a spec of these is not legal; empty when it is."""
        return (
            rules.literals(operation)
            or self.operation_reasons(operation)
            or rules.literals(schedule)
            or self.schedule_reasons(arch, operation, schedule)
        )
