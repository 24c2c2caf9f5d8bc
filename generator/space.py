"""From a configuration to its kernels: every legal point of its spaces, in stable order.

An operation that is not legal, a space without a legal point, and more than 10,000 points are
errors in the file. A schedule that is not legal for its operation is rejected, with the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from warploom.errors import ConfigurationError
from warploom.generator.architectures import architecture
from warploom.generator.config import Configuration, Placed, Space, load
from warploom.generator.document import together
from warploom.generator.specification import KernelSpec, Operation, Schedule

MAXIMUM_POINTS = 10_000
_REASONS_TOLD = 3  # of why a space is empty


@dataclass(frozen=True, slots=True)
class Rejection:
    """A point that is no kernel, and every rule that it breaks."""

    operation: Operation
    schedule: Schedule
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Expansion:
    """All points of a configuration: kernels and rejections, each once, in the file's order."""

    specs: list[KernelSpec]
    rejected: list[Rejection]


def expand_file(path: str | Path) -> Expansion:
    """Load the configuration at `path` and expand it; ConfigurationError for what is wrong."""
    return expand(load(Path(path)))


def expand(configuration: Configuration) -> Expansion:
    """Return the kernels of `configuration`, or raise one ConfigurationError with all problems."""
    spaces = configuration.spaces.value
    count = sum(map(_points, spaces))
    if count > MAXIMUM_POINTS:
        raise ConfigurationError(
            f"{configuration.spaces.place}: {count} points",
            rule=f"a configuration has at most {MAXIMUM_POINTS}",
            fix="give fewer values, or split the file",
        )
    # Dictionaries for their order: two entries may well share points.
    specs: dict[KernelSpec, None] = {}
    rejected: dict[Rejection, None] = {}
    problems: list[ConfigurationError] = []
    for space in spaces:
        for operation in space.operations:
            try:
                expansion = _expand(configuration.arch, space, operation)
            except ConfigurationError as error:
                problems.append(error)
            else:
                specs.update(dict.fromkeys(expansion.specs))
                rejected.update(dict.fromkeys(expansion.rejected))
    if problems:
        raise together(problems)
    return Expansion(list(specs), list(rejected))


def points(path: str | Path, operation: Operation) -> list[KernelSpec]:
    """Return the legal points that the schedules of a configuration have for another operation.

    Schedules of other families are left out, and so is the configuration's own list of operations.
    """
    loaded = load(Path(path))
    found: dict[KernelSpec, None] = {}
    for space in loaded.spaces.value:
        if space.family.name != operation.family:
            continue
        arch = architecture(loaded.arch)
        for schedule in _schedules(loaded.arch, space, operation):
            if not space.family.reasons(arch, operation, schedule):
                found[KernelSpec(loaded.arch, operation, schedule)] = None
    return list(found)


def operations(path: str | Path) -> list[Operation]:
    """Return the operations of the configuration at `path`, each once; ConfigurationError as above.

    Its schedules are read, and not expanded.
    """
    found: dict[Operation, None] = {}
    problems: list[ConfigurationError] = []
    for space in load(Path(path)).spaces.value:
        for placed in space.operations:
            try:
                found[_legal(space, placed)] = None
            except ConfigurationError as error:
                problems.append(error)
    if problems:
        raise together(problems)
    return list(found)


def _legal(space: Space, placed: Placed[Operation]) -> Operation:
    """The operation; ConfigurationError with its place for one that is not legal."""
    if illegal := space.family.operation_reasons(placed.value):
        raise ConfigurationError(
            f"{placed.place}: {'; '.join(illegal)}", fix="change the operation"
        )
    return placed.value


def _points(space: Space) -> int:
    per_operation = sum(prod(map(len, schedule.values())) for schedule in space.schedules)
    return len(space.operations) * per_operation


def _expand(arch: str, space: Space, placed: Placed[Operation]) -> Expansion:
    operation = _legal(space, placed)
    expansion = Expansion([], [])
    for schedule in _schedules(arch, space, operation):
        reasons = space.family.reasons(architecture(arch), operation, schedule)
        if reasons:
            expansion.rejected.append(Rejection(operation, schedule, tuple(reasons)))
        else:
            expansion.specs.append(KernelSpec(arch, operation, schedule))
    if not expansion.specs:
        raise _empty(placed, expansion.rejected)
    return expansion


def _schedules(arch: str, space: Space, operation: Operation) -> Iterator[Schedule]:
    for schedule in space.schedules:
        for point in product(*schedule.values()):
            fields = dict(zip(schedule, point, strict=True))
            yield space.family.complete(arch, operation, fields)


def _empty(placed: Placed[Operation], rejected: list[Rejection]) -> ConfigurationError:
    counts = Counter(reason for rejection in rejected for reason in rejection.reasons)
    told = [
        f"{reason} ({count} of {len(rejected)} schedules)" for reason, count in counts.most_common()
    ]
    more = f"; and {len(told) - _REASONS_TOLD} more" if len(told) > _REASONS_TOLD else ""
    return ConfigurationError(
        f"{placed.place}: no legal schedule",
        rule="; ".join(told[:_REASONS_TOLD]) + more,
        fix="change the schedules, or give this operation an entry of its own",
    )
