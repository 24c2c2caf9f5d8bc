"""What is tuned: the operations of a configuration at shapes, each with all its legal schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from warploom.errors import ProblemError
from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.model import rank
from warploom.generator.records import Environment, Record, problem_text
from warploom.generator.shapes import Shape
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec, Operation, Schedule
from warploom.runtime import dispatch
from warploom.runtime.records import known


@dataclass(frozen=True)
class Problem:
    """An operation at a shape, and the kernels of the configuration that compute it."""

    operation: Operation
    shape: Shape
    space: tuple[KernelSpec, ...]

    def __str__(self) -> str:
        """The operation and the shape, for people."""
        return problem_text(self.operation, self.shape)


def problems(
    path: Path,
    shapes: Sequence[str] = (),
    *,
    model: str | None = None,
    rows: Sequence[int] = (),
) -> list[Problem]:
    """Return every operation of the configuration at `path` at every shape.

    Shapes are those given, or the cells of benchmarks/cells.yaml: of one model or of all, with
    these numbers of rows. Raises ConfigurationError for what is wrong in the
    file, among it a space without a legal point, and ProblemError for a shape that is none.
    """
    spaces: dict[Operation, list[KernelSpec]] = {}
    for spec in expand_file(path).specs:
        spaces.setdefault(spec.operation, []).append(spec)
    found = []
    for operation, specs in spaces.items():
        for shape in shapes_of(operation, shapes, model, rows):
            space = tuple(dict.fromkeys(_fitted(specs, shape)))
            if not space:
                rule, fix = family(operation.family).table.unsuited
                raise ProblemError(f"{path}: no schedule for {shape}", rule=rule, fix=fix)
            found.append(Problem(operation, shape, space))
    if not found:
        raise ProblemError(
            f"{path}: nothing to tune",
            rule="none of its operations has a case in benchmarks/cells.yaml",
            fix="give --shapes",
        )
    return found


def _fitted(specs: Iterable[KernelSpec], shape: Shape) -> Iterator[KernelSpec]:
    """The kernels of one operation that dense tensors can have, as these want them."""
    for spec in specs:
        operation, schedule = spec.operation, spec.schedule
        table = family(operation.family).table
        requires = table.required(operation, shape)
        found: KernelSpec | None = spec  # to make it anew, all its rules would be asked
        if not table.suits(schedule, shape) or table.fitted(schedule, requires) != schedule:
            found = fitting(operation, shape, schedule, spec.arch)
        if found is not None:
            yield found


def shapes_of(
    operation: Operation, shapes: Sequence[str], model: str | None, rows: Sequence[int]
) -> list[Shape]:
    """Return the shapes that are given, each once, or the cells of an operation."""
    known = family(operation.family)
    if shapes:
        return list(dict.fromkeys(known.read_shape(operation, written) for written in shapes))
    return list(dict.fromkeys(known.cells(operation, model, rows)))


def default(operation: Operation, shape: Shape, device: DeviceLimits) -> KernelSpec:
    """The kernel of dense tensors that is run without tuning."""
    requires = family(operation.family).table.required(operation, shape)
    return dispatch.untuned(operation, shape, device, requires).spec


def likeliest(
    operation: Operation, shape: Shape, device: DeviceLimits, count: int
) -> list[KernelSpec]:
    """The first kernels of the table for dense tensors, as the model ranks them."""
    requires = family(operation.family).table.required(operation, shape)
    kernels = dict.fromkeys(dispatch.portfolio(operation, shape, device, requires))
    ranked = rank(known(device.gpu).constants, kernels, shape, device.multiprocessors)
    return [one.spec for one in ranked[:count]]


def usual(operation: Operation, shape: Shape, device: DeviceLimits) -> list[KernelSpec]:
    """The kernels for dense tensors that the table has for the class of a problem, in its order."""
    table = family(operation.family).table
    requires = table.required(operation, shape)
    rows = table.rows(operation, shape)
    found = (table.kernel(row, operation, shape, device.arch, requires) for row in rows)
    return list(dict.fromkeys(filter(None, found)))


def fitting(operation: Operation, shape: Shape, schedule: Schedule, arch: str) -> KernelSpec | None:
    """A schedule's kernel where dense tensors can have it, else None."""
    requires = family(operation.family).table.required(operation, shape)
    return dispatch.fitting(operation, shape, schedule, arch, requires)


def runnable(record: Record, here: Environment) -> bool:
    """Whether this version makes the best kernel of a record: others may have been of another."""
    arch = DeviceLimits(here.multiprocessors, here.gpu).arch
    return fitting(record.operation, record.shape, record.best.schedule, arch) is not None
