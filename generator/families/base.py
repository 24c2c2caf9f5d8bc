"""The surface that every kernel family has: its dataclasses and pure functions of them."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, Generic, Protocol, get_args

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.errors import ProblemError
from warploom.generator import names, rules
from warploom.generator.architectures import Architecture
from warploom.generator.families.table import OperationT, ScheduleT, ShapeT, Table
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.locks import remember
from warploom.generator.models import Model
from warploom.generator.parameters import ParameterBlock
from warploom.generator.shapes import Work, extents_of
from warploom.generator.specification import KernelSpec
from warploom.suggestions import suggestion

ProblemT = TypeVar("ProblemT", default=Any)

# Shapes as tables print them: several GEMMs, and each size of the others.
_COUNTED = re.compile(r"(\d+) of (\S+)")
_NAMED = re.compile(r"([a-z_]+)=?(\d+)")
_LEGAL = 1024  # operations remembered of each family


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


class Family(Generic[OperationT, ScheduleT, ShapeT, ProblemT]):
    """One family. Reasons say why something is not legal: none of them when it is.

    A family is a class in the package of its folder, which names its types: `class Axpy(Family[
    AxpyOperation, AxpySchedule, AxpyShape, AxpyShape])`. Functions of the folder's modules that
    are called as its methods are these methods, and what a folder does not have is inherited.

    operation, schedule   frozen dataclasses: their fields are the configuration's too
    shape                 what a record and the cost model know of a problem
    constants             of the cost model, where a fit begins: `START`, beside the function
                          `seconds`; none where there is no model
    table                 what it knows of choosing a kernel: of the subclass of Table that the
                          folder has, or of the inherited one
    revision              raised when a template's performance changes: records of an older one
                          are hints
    schedule_reasons      why the schedule does not fit the operation on the architecture
    parameters            the parameter block of the spec's kernels
    launches              the kernel launches of one call, in order; ProblemError for extents
                          beyond 32 bits
    """

    operation: type[OperationT]
    schedule: type[ScheduleT]
    shape: type[ShapeT]
    constants: Mapping[str, float] = MappingProxyType({})
    table: Table[OperationT, ScheduleT, ShapeT]
    table_type: ClassVar[type[Table]] = Table
    revision: int = 1

    # What a folder must have; all else has a default below.
    schedule_reasons: Callable[[Architecture, OperationT, ScheduleT], list[str]]
    parameters: Callable[[KernelSpec[OperationT, ScheduleT]], ParameterBlock[Any]]
    launches: Callable[[KernelSpec[OperationT, ScheduleT], ProblemT, DeviceLimits], list[Launch]]

    def __init_subclass__(cls) -> None:
        """Make the folder's functions the family's methods.

        Raises:
            TypeError: the folder lacks a type or a function that every family has, or two of its
                modules have the same one.
        """
        super().__init_subclass__()
        if folder(cls).startswith("_"):  # shared by several families
            return
        modules = _modules(cls.__module__)
        types = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        for name, kind in zip(("operation", "schedule", "shape"), types, strict=False):
            if kind is not Any and isinstance(kind, type) and not hasattr(cls, name):
                setattr(cls, name, kind)
        for name in _METHODS:
            _take(cls, name, modules)
        if "seconds" in vars(cls):
            cls.constants = _constants(cls)
        cls.table_type = _table(cls, modules)
        cls.table = cls.table_type(folder(cls))
        _check(cls)

    def __init__(self) -> None:
        self._legal: dict[OperationT, bool] = {}  # that were met: each is examined once

    @property
    def name(self) -> str:
        """The name of its folder, here and in templates/."""
        return folder(type(self))

    def operation_reasons(self, operation: OperationT) -> list[str]:
        """Why the operation is not legal, beside fields that hold no value they may have."""
        return []

    def reasons(self, arch: Architecture, operation: OperationT, schedule: ScheduleT) -> list[str]:
        """Why a spec of these is not legal; empty when it is."""
        return self.operation_faults(operation) or self.schedule_faults(arch, operation, schedule)

    def operation_faults(self, operation: OperationT) -> list[str]:
        """Why an operation is not legal, whatever its schedule is."""
        return rules.fields(operation) or self.operation_reasons(operation)

    def require_legal(self, operation: OperationT) -> None:
        """Raise ProblemError for an operation that is not legal."""
        if operation in self._legal:
            return
        if reasons := self.operation_faults(operation):
            value, _, rule = reasons[0].partition(": ")
            raise ProblemError(value, rule=rule, fix=self.table.advice)
        remember(self._legal, operation, True, _LEGAL)

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

    def context(self, spec: KernelSpec[OperationT, ScheduleT]) -> dict[str, Any]:
        """What the template is rendered with, beside what every family's is: see `render`."""
        return {}

    def workspaces(
        self, spec: KernelSpec[OperationT, ScheduleT], problem: ProblemT
    ) -> list[Workspace]:
        """The buffers that the launches of one call need, beside its tensors."""
        return []

    def parse_shape(self, operation: OperationT, text: str) -> ShapeT:
        """The shape that `text` is, as a command line has it; ProblemError for what is none.

        Where the family says nothing, its extents have an x between them.
        """
        sizes = [one.name for one in fields(self.shape)]
        return self.shape(**extents_of(text, [sizes], self.name))

    def read_shape(self, operation: OperationT, text: str) -> ShapeT:
        """The shape that `text` is, as `parse_shape` reads it or as tables print it.

        Tables print a problem as its operation and its shape: sizes by name, as `batch4 heads32`,
        or of GEMMs `4096x6144x4096` and `16 of 4096x6144x4096`. The operation may be left out.

        Args:
            operation: What the shape is of.
            text: The shape, of one problem.

        Returns:
            The shape, for which `str` gives what tables print.

        Raises:
            ProblemError: It is no shape of the operation; the error names what is wrong.
        """
        text = text.strip().removeprefix(f"{self.name}_{names.full(operation)} ")
        if counted := _COUNTED.fullmatch(text):
            return self.parse_shape(operation, "x".join(counted.groups()))
        words = [_NAMED.fullmatch(word) for word in text.split()]
        pairs = [word.groups() for word in words if word]
        if not pairs or len(pairs) < len(words):
            return self.parse_shape(operation, text)
        present = [name for name, _ in pairs]
        known = [one.name for one in fields(self.shape)]
        for name in present:
            if name not in known or present.count(name) > 1:
                raise ProblemError(
                    f"shape {text!r}: {name!r}",
                    rule=f"a size of {self.name} must be one of {', '.join(known)}, once",
                    fix=suggestion(name, known) or "leave it out",
                )
        absent = dict.fromkeys(self.shape.optional, 0)
        absent |= {
            one.name: one.default for one in fields(self.shape) if one.default is not MISSING
        }
        needed = [name for name in known if name not in absent]
        if missing := [name for name in needed if name not in present]:
            raise ProblemError(
                f"shape {text!r}: no {missing[0]}",
                rule=f"a shape of {self.name} must have {' '.join(needed)}",
                fix=f"add {missing[0]}NUMBER",
            )
        sizes = extents_of("x".join(number for _, number in pairs), [present], self.name)
        shape = self.shape(**absent | sizes)
        self.refuse_shape(operation, shape)
        return shape

    def refuse_shape(self, operation: OperationT, shape: ShapeT) -> None:
        """Raise ProblemError for a shape whose sizes, each by its name, the operation cannot have.

        Where the family says nothing, it can have any.
        """

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
        sizes = [one.name for one in fields(self.shape)]
        return {name: problem[name] for name in sizes} if {*sizes} <= problem.keys() else None

    def work(self, operation: OperationT, shape: ShapeT) -> Work | None:
        """What a problem asks of any kernel, for a roofline; None where the family does not say."""
        return None

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


# ---- What a folder has ---------------------------------------------------------------------------

_REQUIRED = ("operation", "schedule", "shape", "schedule_reasons", "parameters", "launches")
_METHODS = (
    *("operation_reasons", "schedule_reasons", "complete", "tailored", "layout", "parameters"),
    *("context", "launches", "workspaces", "parse_shape", "refuse_shape", "cells", "of_model"),
    *("extents_of_cell", "seconds", "work"),
)
_FOLDERS = __name__.rpartition(".")[0] + "."


def folder(kind: type) -> str:
    """The name of the folder that a family's class lies in, which is the family's."""
    return kind.__module__.removeprefix(_FOLDERS).partition(".")[0]


def _modules(package: str) -> dict[str, ModuleType]:
    """The modules of a folder, by name."""
    names = (module.name for module in iter_modules(sys.modules[package].__path__))
    return {name: import_module(f"{package}.{name}") for name in names}


def _take(cls: type[Family], name: str, modules: Mapping[str, ModuleType]) -> None:
    """Make the function of this name the class's method; one in its body stays."""
    homes = [
        module
        for module in modules.values()
        if getattr(vars(module).get(name), "__module__", "") == module.__name__
    ]
    if len(homes) + (name in vars(cls)) > 1:
        places = [module.__name__ for module in homes] + [cls.__qualname__] * (name in vars(cls))
        raise TypeError(
            f"family {folder(cls)} has {name} in {' and in '.join(places)}: leave it in one of them"
        )
    if homes:
        setattr(cls, name, staticmethod(vars(homes[0])[name]))


def _constants(cls: type[Family]) -> Mapping[str, float]:
    """What begins a fit of the cost model: the `START` beside `seconds`."""
    home = sys.modules[cls.seconds.__module__]
    if not hasattr(home, "START"):
        raise TypeError(f"{home.__name__} has no START: name the cost model's constants there")
    constants: Mapping[str, float] = home.START
    return constants


def _table(cls: type[Family], modules: Mapping[str, ModuleType]) -> type[Table]:
    """The class of tables that a folder's modules define; the inherited one where there is none."""
    kinds = [
        kind
        for module in modules.values()
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Table) and kind.__module__ == module.__name__
    ]
    if len(kinds) > 1:
        names = " and ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"family {folder(cls)} has the tables {names}: define one")
    return kinds[0] if kinds else cls.table_type


def _check(cls: type[Family]) -> None:
    """Raise TypeError where the folder lacks something that every family has."""
    missing = [name for name in _REQUIRED if not hasattr(cls, name)]
    if missing:
        types = [name for name in missing if name in ("operation", "schedule", "shape")]
        fix = (
            f"write it in the brackets of `class {cls.__name__}(Family[...])`"
            if types
            else f"define a function of this name in a module of {cls.__module__}"
        )
        raise TypeError(f"family {folder(cls)} has no {missing[0]}: {fix}")
