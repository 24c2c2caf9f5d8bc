"""The surface that every kernel family has: its dataclasses and pure functions of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Generic, Protocol

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.families.table import OperationT, ScheduleT, ShapeT, Table, folder
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.models import Model
from warploom.generator.parameters import ParameterBlock
from warploom.generator.shapes import extents_of
from warploom.generator.specification import KernelSpec

ProblemT = TypeVar("ProblemT", default=Any)


class Layout(Protocol):
    """Where everything of one block lies."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the launch; of the largest, where there are several."""
        ...


@dataclass(frozen=True, slots=True)
class NoMemory:
    """The layout of a block that has no shared memory."""

    shared_bytes: int = 0


class Family(ABC, Generic[OperationT, ScheduleT, ShapeT, ProblemT]):
    """One family. Reasons say why something is not legal: none of them when it is.

    operation, schedule   frozen dataclasses: their fields are the configuration's too
    shape                 what a record and the cost model know of a problem
    constants             of the cost model, where a fit begins; none where there is no model
    table                 what it knows of choosing a kernel
    revision              raised when a template's performance changes: records of an older one
                          are hints
    """

    operation: type[OperationT]
    schedule: type[ScheduleT]
    shape: type[ShapeT]
    constants: Mapping[str, float] = MappingProxyType({})
    table: Table[OperationT, ScheduleT, ShapeT]
    revision: int = 1

    @property
    def name(self) -> str:
        """The name of its folder, here and in templates/."""
        return folder(type(self))

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
        return self.operation_faults(operation) or self.schedule_faults(arch, operation, schedule)

    def operation_faults(self, operation: OperationT) -> list[str]:
        """Why an operation is not legal, whatever its schedule is."""
        return rules.fields(operation) or self.operation_reasons(operation)

    def schedule_faults(
        self, arch: Architecture, operation: OperationT, schedule: ScheduleT
    ) -> list[str]:
        """Why a schedule is not legal for an operation that is."""
        return rules.fields(schedule) or self.schedule_reasons(arch, operation, schedule)

    def complete(self, arch: str, operation: OperationT, fields: Mapping[str, Any]) -> ScheduleT:
        """Make a schedule of `fields`, of which those that may be `auto` may be missing, too."""
        return self.schedule(**fields)

    def tailored(
        self, operation: OperationT, shape: ShapeT, device: DeviceLimits
    ) -> Sequence[ScheduleT]:
        """Legal schedules for one shape, of dense tensors, that no space lists: it has too many."""
        return ()

    def layout(self, spec: KernelSpec[OperationT, ScheduleT]) -> Layout:
        """Shared memory and registers, derived from operation and schedule."""
        return NoMemory()

    @abstractmethod
    def parameters(self, spec: KernelSpec[OperationT, ScheduleT]) -> ParameterBlock[Any]:
        """The parameter block of the spec's kernels."""

    def context(self, spec: KernelSpec[OperationT, ScheduleT]) -> dict[str, Any]:
        """What the template is rendered with, beside what every family's is: see `render`."""
        return {}

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

    def parse_shape(self, operation: OperationT, text: str) -> ShapeT:
        """The shape that `text` is, as a command line has it; ProblemError for what is none.

        Where the family says nothing, its extents have an x between them.
        """
        names = [one.name for one in fields(self.shape)]
        return self.shape(**extents_of(text, [names], self.name))

    def cells(
        self, operation: OperationT, model: str | None, rows: Sequence[int]
    ) -> Sequence[ShapeT]:
        """The cells of benchmarks/cells.yaml: of one model or of all, of these rows or of all.

        WarploomError for a model that the family has none of.
        """
        return ()

    def of_model(self, operation: OperationT, model: Model) -> Sequence[OperationT]:
        """What a model runs of an operation while it generates: in its type, of its heads."""
        return (operation,)

    def extents_of_cell(self, problem: Mapping[str, Any]) -> dict[str, Any] | None:
        """The extents of the problem of a benchmark's result; None where it says too little."""
        names = [one.name for one in fields(self.shape)]
        return {name: problem[name] for name in names} if {*names} <= problem.keys() else None

    def seconds(
        self,
        constants: Mapping[str, float],
        operation: OperationT,
        schedule: ScheduleT,
        shape: ShapeT,
        multiprocessors: int,
    ) -> float:
        """The seconds that one call should take, by these constants of the cost model."""
        return math.inf
