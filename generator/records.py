"""Tuned results: which schedule is best for a shape of an operation, on which GPU, and by how much.

A record is a measured fact with the circumstances it holds in: GPU, multiprocessors, NVRTC's
version, and the family's `revision`. Where these differ from those at hand the record is stale: a
hint of what to try first, not a decision. `records_file.py` has the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from warploom.errors import RecordsError, SpecificationError, UnknownNameError
from warploom.generator.families import family
from warploom.generator.model.shapes import Shape, distance, shape_type, text
from warploom.generator.restore import restore
from warploom.generator.specification import Operation, Schedule

RUNNERS_UP = 4  # kept beside the best


@dataclass(frozen=True, slots=True)
class Environment:
    """What a measurement depends on beside operation, shape and schedule.

    nvrtc is its major.minor version; None where there is no compiler, which excludes nothing.
    """

    gpu: str
    multiprocessors: int
    nvrtc: str | None
    revision: int

    def differences(self, here: Environment) -> tuple[str, ...]:
        """Why what was measured in this environment is stale `here`; empty when it is not."""
        found = [
            (name, getattr(self, name), getattr(here, name))
            for name in ("gpu", "multiprocessors", "nvrtc", "revision")
        ]
        return tuple(
            f"{name} {mine}, here {other}"
            for name, mine, other in found
            if mine != other and not (name == "nvrtc" and None in (mine, other))
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """A schedule, its median seconds, and the distance between the quartiles relative to it."""

    schedule: Schedule
    seconds: float
    spread: float


@dataclass(frozen=True)
class Record:
    """The best schedule of one problem, beside the untuned default and the runners-up.

    All of them were correct on fresh random data and timed in one loop.

    measured    when: ISO 8601, UTC
    default     None where the untuned choice itself failed
    noisy       clocks were unsteady, and so were the times
    templates   digest of the best kernel's source: tells which templates, decides nothing
    """

    operation: Operation
    shape: Shape
    environment: Environment
    best: Timed
    default: Timed | None
    runners_up: tuple[Timed, ...] = ()
    measured: str = ""
    noisy: bool = False
    templates: str = ""

    @cached_property
    def key(self) -> tuple[str, ...]:
        """What a record is found and sorted by; one record is kept of each key."""
        here = self.environment
        circumstances = (str(here.multiprocessors), str(here.nvrtc), str(here.revision))
        return (*problem_key(self.operation, self.shape), *circumstances)

    @property
    def contenders(self) -> tuple[Timed, ...]:
        """Every schedule that was timed, the best first, each once."""
        timed = (self.best, *self.runners_up, *((self.default,) if self.default else ()))
        return tuple({one.schedule: one for one in timed}.values())

    @property
    def speedup(self) -> float | None:
        """The default's time over the best's."""
        return self.default.seconds / self.best.seconds if self.default else None


def problem_key(operation: Operation, shape: Shape) -> tuple[str, ...]:
    """An operation and a shape as strings that sort as people would: numbers by their size."""
    fields = asdict(operation)
    lead = json.dumps(fields, sort_keys=True)
    return (operation.family, lead, *(f"{value:012d}" for value in asdict(shape).values()))


def problem_text(operation: Operation, shape: Shape) -> str:
    """An operation and a shape for people."""
    return f"{'_'.join((operation.family, *operation.tokens))} {text(shape)}"


@dataclass(frozen=True)
class Records:
    """The records of one GPU kind, one for each key, in the order of their keys."""

    gpu: str
    records: tuple[Record, ...] = ()
    _index: dict[tuple[str, ...], list[Record]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        kept = {record.key: record for record in self.records}
        object.__setattr__(self, "records", tuple(kept[key] for key in sorted(kept)))
        for record in self.records:
            self._index.setdefault(problem_key(record.operation, record.shape), []).append(record)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def merged(self, more: Iterable[Record]) -> Records:
        """These and `more`: of two with one key the later one, of one revision the newest."""
        found = {record.key: record for record in self.records}
        for record in more:
            if record.environment.gpu != self.gpu:
                raise RecordsError(
                    f"a record of {record.environment.gpu}",
                    rule=f"these are the records of {self.gpu}",
                    fix="keep a file for each GPU",
                )
            known = found.get(record.key)
            if known is None or record.measured >= known.measured:
                found[record.key] = record
        newest: dict[tuple[str, ...], int] = {}
        for key in found:
            newest[key[:-1]] = max(newest.get(key[:-1], 0), int(key[-1]))
        kept = (found[key] for key in found if int(key[-1]) == newest[key[:-1]])
        return Records(self.gpu, tuple(kept))

    def exact(self, operation: Operation, shape: Shape, here: Environment) -> Record | None:
        """The record of this very problem in this environment; of several the newest."""
        found = [r for r in self.of(operation, shape) if not r.environment.differences(here)]
        return max(found, key=lambda record: record.measured, default=None)

    def of(self, operation: Operation, shape: Shape) -> list[Record]:
        """Every record of this very problem, stale ones too."""
        return self._index.get(problem_key(operation, shape), [])

    def nearest(self, operation: Operation, shape: Shape, here: Environment) -> Record | None:
        """The record of the nearest shape of this operation: one that is not stale, if any is."""
        near = [
            (bool(record.environment.differences(here)), distance(record.shape, shape), record.key)
            for record in self.records
            if record.operation == operation
        ]
        near = [found for found in near if math.isfinite(found[1])]
        if not near:
            return None
        key = min(near)[2]
        return next(record for record in self.records if record.key == key)


# ---- Plain values --------------------------------------------------------------------------------


def to_plain(record: Record) -> dict[str, Any]:
    """Return a record as JSON values; the GPU is the file's, and not repeated."""
    environment = asdict(record.environment)
    del environment["gpu"]
    return {
        "operation": asdict(record.operation),
        "shape": asdict(record.shape),
        "environment": environment,
        "best": timed_to_plain(record.best),
        "default": record.default and timed_to_plain(record.default),
        "runners_up": [timed_to_plain(timed) for timed in record.runners_up],
        "measured": record.measured,
        "noisy": record.noisy,
        "templates": record.templates,
    }


def timed_to_plain(timed: Timed) -> dict[str, Any]:
    """Return a timed schedule as JSON values; times have five digits."""
    return {
        "seconds": float(f"{timed.seconds:.5g}"),
        "spread": float(f"{timed.spread:.3g}"),
        "schedule": asdict(timed.schedule),
    }


def from_plain(fields: Mapping[str, Any], gpu: str) -> Record:
    """Return the record that `fields` are of; SpecificationError for what is none."""
    try:
        operation = restore_operation(fields["operation"])
        kind = family(operation.family)
        shape = restore(cast("Any", shape_type(operation.family)), fields["shape"])
        environment = Environment(gpu=gpu, **fields["environment"])
        timed = {
            name: [_timed(kind.schedule, entry) for entry in listed]
            for name, listed in (
                ("best", [fields["best"]]),
                ("default", [fields["default"]] if fields["default"] else []),
                ("runners_up", fields["runners_up"]),
            )
        }
        measured, noisy, templates = (fields[key] for key in ("measured", "noisy", "templates"))
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecificationError(
            f"a record: {error}", rule="has every field that `warploom records show --json` lists"
        ) from error
    except UnknownNameError as error:
        raise SpecificationError(error.value, rule=error.rule) from error
    return Record(
        operation,
        shape,
        _checked(environment),
        timed["best"][0],
        next(iter(timed["default"]), None),
        tuple(timed["runners_up"]),
        str(measured),
        bool(noisy),
        str(templates),
    )


def restore_operation(fields: Mapping[str, Any]) -> Operation:
    """Return the operation that `fields` are of, of whichever family they name."""
    return cast("Operation", restore(family(fields["family"]).operation, dict(fields)))


def _timed(kind: type[Schedule], entry: Mapping[str, Any]) -> Timed:
    seconds, spread = float(entry["seconds"]), float(entry["spread"])
    if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(spread)):
        raise SpecificationError(f"seconds {seconds}", rule="a time is finite and greater than 0")
    return Timed(restore(kind, entry["schedule"]), seconds, spread)


def _checked(environment: Environment) -> Environment:
    counts = (environment.multiprocessors, environment.revision)
    if not all(type(count) is int and count > 0 for count in counts):
        raise SpecificationError(
            f"environment {environment}", rule="multiprocessors and revision are positive integers"
        )
    return replace(environment)
