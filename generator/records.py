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
from dataclasses import fields as fields_of
from datetime import UTC, datetime
from functools import cache, cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

from warploom.errors import RecordsError, SpecificationError, UnknownNameError
from warploom.generator import names
from warploom.generator.families import family
from warploom.generator.restore import restore
from warploom.generator.shapes import Shape, distance
from warploom.generator.specification import Operation, Schedule, counted

RUNNERS_UP = 4  # kept beside the best
SHORTEST, LONGEST = 1e-9, 86_400.0  # seconds that a kernel may have taken


@dataclass(frozen=True, slots=True)
class Environment:
    """What a measurement depends on beside operation, shape and schedule.

    nvrtc is its major.minor version; None where there is no compiler, which excludes nothing.
    SpecificationError for numbers that are not positive.
    """

    gpu: str
    multiprocessors: int
    nvrtc: str | None
    revision: int

    def __post_init__(self) -> None:
        if min(self.multiprocessors, self.revision) < 1:
            raise SpecificationError(
                f"{self.multiprocessors} SMs, revision {self.revision}",
                rule="both must be positive",
            )

    def differences(self, here: Environment) -> tuple[str, ...]:
        """Why what was measured in this environment is stale `here`; empty when it is not."""
        reasons = []
        for name in ("gpu", "multiprocessors", "nvrtc", "revision"):
            mine, other = getattr(self, name), getattr(here, name)
            if mine != other and not (name == "nvrtc" and None in (mine, other)):
                reasons.append(f"{name} {mine}, here {other}")
        return tuple(reasons)


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

    measured    when: ISO 8601, UTC where it names no other offset; see `when`
    default     None where the untuned choice itself failed
    noisy       clocks were unsteady, and so were the times
    templates   digest of the best kernel's source: tells which templates, decides nothing
    autotuned   measured between calls, of few candidates: `warploom tune` looks further
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
    autotuned: bool = False

    @cached_property
    def key(self) -> tuple[str, ...]:
        """What a record is found and sorted by; one record is kept of each key."""
        here = self.environment
        circumstances = (str(here.multiprocessors), str(here.nvrtc), str(here.revision))
        return (*problem_key(self.operation, self.shape), *circumstances)

    @cached_property
    def when(self) -> float:
        """The time that `measured` names, in seconds since 1970; -inf where it names none.

        Dates are written with any offset and precision, so that their texts do not sort by time. A
        record without a date that can be read is older than all that have one.
        """
        try:
            date = datetime.fromisoformat(self.measured)
        except ValueError:
            return -math.inf
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()

    @cached_property
    def contenders(self) -> tuple[Timed, ...]:
        """Every schedule that was timed, the best first, each once."""
        timed = (self.best, *self.runners_up, *((self.default,) if self.default else ()))
        return tuple({one.schedule: one for one in timed}.values())

    def nearness(self, shape: Shape, here: Environment) -> tuple[bool, bool, float]:
        """How little it says of `shape`: whether it is stale, of another layer, and octaves off."""
        stale = bool(self.environment.differences(here))
        return stale, self.shape.layer != shape.layer, distance(self.shape, shape)

    @property
    def speedup(self) -> float | None:
        """The default's time over the best's."""
        return self.default.seconds / self.best.seconds if self.default else None


def problem_key(operation: Operation, shape: Shape) -> tuple[str, ...]:
    """An operation and a shape as strings that sort as people would: numbers by their size."""
    known: Any = operation  # which mypy takes for unhashable
    sizes = (getattr(shape, one.name) for one in fields_of(shape))
    return (operation.family, _sorted(known), *(f"{size:012d}" for size in sizes))


@cache
def _sorted(operation: Operation) -> str:
    """The fields of an operation, of which thousands of records share a few, by their names."""
    return json.dumps(asdict(operation), sort_keys=True)


def problem_text(operation: Operation, shape: Shape) -> str:
    """An operation and a shape for people."""
    return f"{operation.family}_{names.full(operation)} {shape}"


@dataclass(frozen=True)
class Records:
    """The records of one GPU kind, the latest of each key, in the order of their keys."""

    gpu: str
    records: tuple[Record, ...] = ()
    _index: dict[Operation, dict[Shape, list[Record]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        kept = {one.key: one for one in sorted(self.records, key=attrgetter("when"))}
        object.__setattr__(self, "records", tuple(kept[key] for key in sorted(kept)))
        for record in self.records:
            shapes = self._index.setdefault(record.operation, {})
            shapes.setdefault(record.shape, []).append(record)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def merged(self, more: Iterable[Record]) -> Records:
        """These and `more`: of two with one key the later one, of one revision the newest.

        Of two of the same time, and of two whose times cannot be read, that of `more` is kept.
        """
        found = {record.key: record for record in self.records}
        for record in more:
            if record.environment.gpu != self.gpu:
                raise RecordsError(
                    f"a record of {record.environment.gpu}",
                    rule=f"these are the records of {self.gpu}",
                    fix="keep a file for each GPU",
                )
            known = found.get(record.key)
            if known is None or record.when >= known.when:
                found[record.key] = record
        newest: dict[tuple[str, ...], int] = {}
        for key in found:
            newest[key[:-1]] = max(newest.get(key[:-1], 0), int(key[-1]))
        kept = (found[key] for key in found if int(key[-1]) == newest[key[:-1]])
        return Records(self.gpu, tuple(kept))

    def replaced_by(self, record: Record) -> Record:
        """Return a record that was just measured, dated so that it takes the place of one here.

        A clock that ran back, or was wrong when that one was measured, would keep the old one.
        """
        known = next((one for one in self.records if one.key == record.key), None)
        if known is None or known.when <= record.when:
            return record
        return replace(record, measured=known.measured)

    def exact(self, operation: Operation, shape: Shape, here: Environment) -> Record | None:
        """The record of this very problem in this environment; of several the newest."""
        every = self._index.get(operation, {}).get(shape, [])
        fresh = [record for record in every if not record.environment.differences(here)]
        return max(fresh, key=attrgetter("when"), default=None)

    def _of_operation(self, operation: Operation) -> Iterator[Record]:
        return chain.from_iterable(self._index.get(operation, {}).values())

    def nearest(
        self, operation: Operation, shape: Shape, here: Environment, within: float = math.inf
    ) -> Record | None:
        """The record of the nearest shape of this operation: one that is not stale, if any is.

        Those of the same layer are nearest; others are at most `within` octaves apart. For an
        operation whose table does not use near records, only one of this very shape counts.
        """
        found: list[tuple[tuple[bool, bool, float], Record]] = []
        uses_near = family(operation.family).table.uses_near_records(operation)
        for record in self._of_operation(operation):
            order = record.nearness(shape, here)
            near = math.isfinite(order[-1]) and (not order[1] or order[-1] <= within)
            if near and (uses_near or record.shape == shape):
                found.append((order, record))
        return min(found, key=lambda one: one[0], default=(None, None))[1]

    def around(
        self, operation: Operation, shape: Shape, here: Environment
    ) -> tuple[Record, Record] | None:
        """The records of a layer's calls that are next to `shape`, with fewer and with more rows.

        None where one of them is missing, or stale, and for layers whose calls differ in more.
        """
        if len(shape.calls) != 1:
            return None
        (rows,) = shape.calls
        own, layer = getattr(shape, rows), shape.layer
        found = {
            getattr(record.shape, rows): record
            for record in self._of_operation(operation)
            if record.shape.layer == layer
            if not record.environment.differences(here)
        }
        below = max((count for count in found if count < own), default=None)
        above = min((count for count in found if count > own), default=None)
        return None if below is None or above is None else (found[below], found[above])


# ---- Plain values --------------------------------------------------------------------------------


def to_plain(record: Record) -> dict[str, Any]:
    """Return a record as JSON values; the GPU is the file's, and not repeated."""
    environment = asdict(record.environment)
    del environment["gpu"]
    return {
        "operation": counted(record.operation),
        "shape": asdict(record.shape),
        "environment": environment,
        "best": timed_to_plain(record.best),
        "default": record.default and timed_to_plain(record.default),
        "runners_up": [timed_to_plain(timed) for timed in record.runners_up],
        "measured": record.measured,
        "noisy": record.noisy,
        "templates": record.templates,
        **({"autotuned": True} if record.autotuned else {}),
    }


def timed_to_plain(timed: Timed) -> dict[str, Any]:
    """Return a timed schedule as JSON values; times have five digits."""
    return {
        "seconds": float(f"{timed.seconds:.5g}"),
        "spread": float(f"{timed.spread:.3g}"),
        "schedule": counted(timed.schedule),
    }


def from_plain(fields: Mapping[str, Any], gpu: str) -> Record:
    """Return the record that `fields` are of; SpecificationError for what is none."""
    try:
        operation = restore_operation(fields["operation"])
        kind = family(operation.family).schedule
        return Record(
            operation,
            restore_shape(operation.family, fields["shape"]),
            restore(Environment, {**fields["environment"], "gpu": gpu}),
            _timed(kind, fields["best"]),
            _timed(kind, fields["default"]) if fields["default"] else None,
            tuple(_timed(kind, entry) for entry in fields["runners_up"]),
            restore(str, fields["measured"], "measured"),
            restore(bool, fields["noisy"], "noisy"),
            restore(str, fields["templates"], "templates"),
            restore(bool, fields.get("autotuned", False), "autotuned"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecificationError(
            f"a record: {error}",
            rule="must have every field that `warploom records show --json` lists",
        ) from error
    except UnknownNameError as error:
        raise SpecificationError(error.value, rule=error.rule) from error


def restore_operation(fields: Mapping[str, Any]) -> Operation:
    """Return the operation that `fields` are of, of whichever family they name."""
    found: Operation = restore(family(fields["family"]).operation, dict(fields))
    return found


def restore_shape(name: str, fields: Any) -> Shape:  # noqa: ANN401 (parsed JSON)
    """Return the shape that `fields` are of, of a problem of the family called `name`."""
    shape: Shape = restore(family(name).shape, fields)
    if wrong := shape.empty:
        raise SpecificationError(f"shape {shape}", rule=f"{wrong} must be positive")
    return shape


def restore_seconds(value: Any) -> float:  # noqa: ANN401 (parsed JSON)
    """Return a time that was measured: what is under a nanosecond or over a day is none."""
    seconds = restore(float, value, "seconds")
    if not SHORTEST <= seconds <= LONGEST:
        raise SpecificationError(f"seconds {seconds}", rule=f"must be {SHORTEST:g} to {LONGEST:g}")
    return seconds


def restore_spread(value: Any) -> float:  # noqa: ANN401 (parsed JSON)
    """Return the distance of two quartiles relative to their median."""
    spread = restore(float, value, "spread")
    if not 0 <= spread < math.inf:
        raise SpecificationError(f"spread {spread}", rule="must be finite and 0 or more")
    return spread


def _timed(kind: type[Schedule], entry: Mapping[str, Any]) -> Timed:
    seconds, spread = restore_seconds(entry["seconds"]), restore_spread(entry["spread"])
    return Timed(restore(kind, entry["schedule"]), seconds, spread)
