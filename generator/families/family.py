"""The surface that every kernel family has: its dataclasses and pure functions of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.parameters import ParameterBlock
from warploom.generator.specification import KernelSpec, Operation, Schedule

OperationT = TypeVar("OperationT", bound=Operation, default=Any)
ScheduleT = TypeVar("ScheduleT", bound=Schedule, default=Any)
ProblemT = TypeVar("ProblemT", default=Any)

_FOLDERS = __name__.rpartition(".")[0] + "."


class Family(ABC, Generic[OperationT, ScheduleT, ProblemT]):
    """One family. Reasons say why something is not legal: none of them when it is.

    operation, schedule   frozen dataclasses: their fields are the configuration's too
    revision              raised when a template's performance changes: records of an older one
                          are hints
    """

    operation: type[OperationT]
    schedule: type[ScheduleT]
    revision: int = 1

    @property
    def name(self) -> str:
        """The name of its folder, here and in templates/."""
        return type(self).__module__.removeprefix(_FOLDERS).partition(".")[0]

    def operation_reasons(self, operation: OperationT) -> list[str]:
        """Why the operation is not legal, beside fields that hold no value they may have."""
        return []

    @abstractmethod
    def schedule_reasons(
        self, arch: Architecture, operation: OperationT, schedule: ScheduleT
    ) -> list[str]:
        """Why the schedule does not fit the operation on `arch`."""

    def reasons(self, arch: Architecture, operation: OperationT, schedule: ScheduleT) -> list[str]:
        """Why a spec of these is not legal; empty when it is."""
        return (
            rules.fields(operation)
            or self.operation_reasons(operation)
            or rules.fields(schedule)
            or self.schedule_reasons(arch, operation, schedule)
        )

    def complete(self, arch: str, operation: OperationT, fields: Mapping[str, Any]) -> ScheduleT:
        """Make a schedule of `fields`, of which those that may be `auto` may be missing, too."""
        return self.schedule(**fields)

    @abstractmethod
    def parse_name(self, name: str) -> KernelSpec[OperationT, ScheduleT] | None:
        """The spec with the fields that `name` shows, or None when it is not of this family."""

    @abstractmethod
    def parameters(self, spec: KernelSpec[OperationT, ScheduleT]) -> ParameterBlock[Any]:
        """The parameter block of the spec's kernels."""

    @abstractmethod
    def context(self, spec: KernelSpec[OperationT, ScheduleT]) -> dict[str, Any]:
        """What the template is rendered with, beside the spec."""

    @abstractmethod
    def launches(
        self, spec: KernelSpec[OperationT, ScheduleT], problem: ProblemT, device: DeviceLimits
    ) -> list[Launch]:
        """The kernel launches of one call, in order; ProblemError for extents beyond 32 bits."""

    def workspaces(
        self, spec: KernelSpec[OperationT, ScheduleT], problem: ProblemT
    ) -> list[Workspace]:
        """The buffers that the launches of one call need, beside its tensors."""
        return []
