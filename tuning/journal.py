"""The journal of a tuning run: every outcome, a JSON line each, on disk as soon as it is known.

It is what a second start resumes from, what the model is fitted from, and what `replay.py` plays
back. A process may die at any time: a last line without its end is dropped, and written anew.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from warploom.errors import RecordsError, SpecificationError, WarploomError
from warploom.generator import json_file
from warploom.generator.families import family
from warploom.generator.held_file import hold, unwritable
from warploom.generator.model.fit import Measurement
from warploom.generator.records import (
    Environment,
    restore_operation,
    restore_seconds,
    restore_shape,
    restore_spread,
)
from warploom.generator.restore import restore
from warploom.generator.shapes import Shape
from warploom.generator.specification import Operation, Schedule
from warploom.printable import brief

SCHEMA = 1
MAXIMUM_BYTES = 1 << 30  # a sweep of a thousand schedules has half a megabyte a problem
_ELSEWHERE = "give another --journal"
Outcome = Literal["correct", "wrong", "compile error", "launch error", "timeout", "illegal"]
_Problem = tuple[Operation, Shape, Environment]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a schedule of one problem.

    seconds, spread   median and distance of the quartiles relative to it; None unless correct
    relative          seconds over those of the default in the same loop
    error             standard error of the time, relative to it, from loop to loop
    reason            why it is not correct
    noisy             clocks were unsteady, twice
    """

    schedule: Schedule
    outcome: Outcome
    seconds: float | None = None
    spread: float | None = None
    relative: float | None = None
    error: float | None = None
    reason: str = ""
    noisy: bool = False


@dataclass(frozen=True, slots=True)
class _Told:
    """A result without its schedule, as lines of journals and of measuring processes have it."""

    outcome: Outcome
    seconds: float | None = None
    spread: float | None = None
    relative: float | None = None
    error: float | None = None
    reason: str = ""
    noisy: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A result and the problem and environment that it is of."""

    operation: Operation
    shape: Shape
    environment: Environment
    result: Result


class Journal:
    """A journal that is appended to; one process at a time."""

    def __init__(self, path: Path) -> None:
        """Open the journal at `path`, or begin it.

        RecordsError for a file that is none, and where another process has it open.
        """
        self.path = path
        self.entries: list[Entry] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = hold(path, timeout=0)
        except TimeoutError as error:
            raise RecordsError(
                f"{path}: in use",
                rule="one run at a time appends to a journal",
                fix="wait for the other run, or give another --journal",
            ) from error
        except OSError as error:
            raise unwritable(path, error, _ELSEWHERE) from error
        try:
            self.entries, self._whole = _read(path)
            os.ftruncate(self._file, self._whole)
            if not self._whole:
                self._append([{"schema": SCHEMA, "journal": "warploom tune"}])
        except BaseException:
            self.close()
            raise

    def add(self, *entries: Entry) -> None:
        """Append entries; they are on disk when this returns.

        RecordsError where that fails; the journal then ends with what came before.
        """
        self._append([*_plain(entries)])
        self.entries += entries

    def known(self, operation: Operation, shape: Shape, here: Environment) -> list[Result]:
        """The results of a problem in this environment, in the order in which they came.

        Those that memory was missing for are left out: other programs may have had it.
        """
        return [
            entry.result
            for entry in self.entries
            if (entry.operation, entry.shape) == (operation, shape)
            and not entry.environment.differences(here)
            and not _passing(entry.result)
        ]

    def close(self) -> None:
        """Close the file, and let others have it."""
        os.close(self._file)

    def _append(self, objects: Sequence[Mapping[str, Any]]) -> None:
        lines = b"".join(json.dumps(fields).encode() + b"\n" for fields in objects)
        try:
            if os.write(self._file, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            with suppress(OSError):  # then the next run drops what there is of the line
                os.ftruncate(self._file, self._whole)
            fix = "free some space, and give the same command again: what was measured is kept"
            raise unwritable(self.path, error, fix) from error
        self._whole += len(lines)


def _passing(result: Result) -> bool:
    """Whether a failure tells of the GPU's or the host's memory, and not of the kernel."""
    words = result.reason.lower().replace("_", " ")
    return result.outcome in ("launch error", "illegal") and (
        "out of memory" in words or "ended with sigkill" in words
    )


def read(path: Path) -> list[Entry]:
    """Read a journal. RecordsError for a file that is none; a last line cut short is left out."""
    return _read(path)[0]


def begins(path: Path) -> bool:
    """Whether a file begins as a journal does, whatever it is called."""
    with suppress(OSError, ValueError):
        first = json_file.content(path, MAXIMUM_BYTES).partition(b"\n")[0]
        found = json_file.parse(first)
        return isinstance(found, dict) and "journal" in found
    return False


def measurements(
    *journals: Iterable[Entry], results: Iterable[Measurement] = ()
) -> list[Measurement]:
    """What the model is fitted from: one time for each correct schedule of each problem.

    Clocks drift between loops, and more between runs (one product took 35 and 42 us), so that is
    the median of its relative times in all journals, times the median of what they are relative to:
    the default, which each journal has first of a problem. Where journals had different defaults,
    the schedules that both measured tell how their times compare. A search times single launches,
    benchmarks loops at the limit of power: where `results` of benchmarks have a schedule of a
    problem, all its times are brought to their scale.
    """
    beside: dict[tuple[Operation, Shape], dict[Schedule, float]] = {}
    for one in results:
        beside.setdefault((one.operation, one.shape), {})[one.schedule] = one.seconds
    groups: dict[_Problem, dict[Schedule, list[Result]]] = {}
    for entries in journals:
        defaults: dict[_Problem, Schedule] = {}
        for entry in entries:
            if entry.result.seconds is not None and entry.result.relative is not None:
                problem = (entry.operation, entry.shape, entry.environment)
                default = defaults.setdefault(problem, entry.result.schedule)
                groups.setdefault(problem, {}).setdefault(default, []).append(entry.result)
    return [
        Measurement(operation, shape, schedule, seconds, environment.multiprocessors)
        for (operation, shape, environment), runs in groups.items()
        for schedule, seconds in _scaled(
            _together([_seconds(found) for found in runs.values()]),
            beside.get((operation, shape), {}),
        ).items()
    ]


def _seconds(results: Sequence[Result]) -> dict[Schedule, float]:
    """The time of every schedule of runs with one default; none where that was never timed."""
    anchors = [result.seconds for result in results if result.relative == 1.0 and result.seconds]
    relatives: dict[Schedule, list[float]] = {}
    for result in results:
        relatives.setdefault(result.schedule, []).append(result.relative or 1.0)
    if not anchors:
        return {}
    return {schedule: median(times) * median(anchors) for schedule, times in relatives.items()}


def _together(runs: Sequence[Mapping[Schedule, float]]) -> dict[Schedule, float]:
    """Times on the scale of the longest run; runs that have no schedule in common are left out."""
    longest, *others = sorted(runs, key=len, reverse=True)
    found = dict(longest)
    for run in others:
        if run.keys() & found.keys():
            found = _scaled(run, found) | found
    return found


def _scaled(
    times: Mapping[Schedule, float], known: Mapping[Schedule, float]
) -> dict[Schedule, float]:
    """Times on the scale of those known; as they are where no schedule is in both."""
    shared = [known[schedule] / times[schedule] for schedule in times.keys() & known.keys()]
    scale = median(shared) if shared else 1.0
    return {schedule: seconds * scale for schedule, seconds in times.items()}


def _read(path: Path) -> tuple[list[Entry], int]:
    """The entries, and how many bytes of the file are whole lines."""
    try:
        content = json_file.content(path, MAXIMUM_BYTES)
    except OSError as error:
        rule = json_file.reason(error)
        raise RecordsError(f"{path}: cannot be read", rule=rule, fix="check the path") from error
    whole = content.rfind(b"\n") + 1
    lines = content[:whole].splitlines()
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            fields = json_file.parse(line)
            if number > 1:
                entries.append(_entry(fields))
            elif fields["schema"] != SCHEMA:
                raise ValueError(f"schema {fields['schema']}, this version reads {SCHEMA}")
        except (ValueError, KeyError, TypeError, AttributeError, WarploomError) as error:
            raise RecordsError(
                f"{path}:{number}: {json_file.reason(error)}",
                rule="a journal must be one JSON object to a line, as `warploom tune` writes it",
                fix="move it away, or pass another --journal; the file was not changed",
            ) from error
    return entries, whole


def _plain(entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    """Entries as JSON values; those of a batch have their problem in common."""
    common: tuple[Any, ...] = ()
    told: dict[str, Any] = {}
    for entry in entries:
        asked = (entry.operation, entry.shape, entry.environment)
        if asked != common:
            common = asked
            told = {
                "operation": asdict(entry.operation),
                "shape": asdict(entry.shape),
                "environment": asdict(entry.environment),
            }
        result = _values(entry.result)
        schedule = _values(result.pop("schedule"))
        known = {name: value for name, value in result.items() if value not in (None, "", False)}
        yield {**told, "schedule": schedule, **known}


def _values(record: Any) -> dict[str, Any]:  # noqa: ANN401 (any dataclass)
    """The fields of a record of plain values; asdict() would copy each of them."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _entry(fields: dict[str, Any]) -> Entry:
    operation = restore_operation(fields.pop("operation"))
    shape = restore_shape(operation.family, fields.pop("shape"))
    environment = restore(Environment, dict(fields.pop("environment")))
    schedule = restore(family(operation.family).schedule, fields.pop("schedule"))
    return Entry(operation, shape, environment, restore_result(schedule, fields))


def checked(schedule: Schedule, result: object) -> Result:
    """Return the result that a GPU of a fleet gave; SpecificationError if it is none of a schedule.

    What comes from a process of this host is restored from JSON, which checks as much.
    """
    if not isinstance(result, Result) or result.schedule != schedule:
        told = brief(result)
        raise SpecificationError(told, rule="must be the result of the schedule that was measured")
    fields = _values(result)
    del fields["schedule"]
    restore_result(schedule, fields)
    return result


def restore_result(schedule: Schedule, fields: Any) -> Result:  # noqa: ANN401 (parsed JSON)
    """Return what `fields` say of a schedule; SpecificationError for what no measurement says."""
    told = restore(_Told, fields, "result")
    if (told.outcome == "correct") != (told.seconds is not None):
        raise SpecificationError(
            f"outcome {told.outcome} with seconds {told.seconds}",
            rule="what is correct, and nothing else, must have a time",
        )
    if told.seconds is not None:
        restore_seconds(told.seconds)
    if told.spread is not None:
        restore_spread(told.spread)
    if told.error is None and told.spread is not None:  # of before: nine rounds were usual
        told = replace(told, error=told.spread / 3)
    if told.error is not None and not 0 <= told.error < math.inf:
        raise SpecificationError(f"error {told.error}", rule="must be finite and 0 or more")
    if told.relative is not None and not 0 < told.relative < math.inf:
        raise SpecificationError(
            f"relative {told.relative}", rule="must be finite and greater than 0"
        )
    return Result(schedule, **asdict(told))
