"""The journal of a tuning run: every outcome, a JSON line each, on disk as soon as it is known.

It is what a second start resumes from, what the model is fitted from, and what `replay.py` plays
back. A process may die at any time: a last line without its end is dropped, and written anew.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any, Literal, cast, get_args

from filelock import FileLock, Timeout

from warploom.errors import RecordsError, WarploomError
from warploom.generator.families import family
from warploom.generator.model.fit import Measurement
from warploom.generator.model.shapes import Shape, shape_type
from warploom.generator.records import Environment, restore_operation
from warploom.generator.restore import restore
from warploom.generator.specification import Operation, Schedule

SCHEMA = 1
Outcome = Literal["correct", "wrong", "compile error", "launch error", "timeout", "illegal"]
_Problem = tuple[Operation, Shape, Environment]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a schedule of one problem.

    seconds, spread   median and distance of the quartiles relative to it; None unless correct
    relative          seconds over those of the default in the same loop
    reason            why it is not correct
    noisy             clocks were unsteady, twice
    """

    schedule: Schedule
    outcome: Outcome
    seconds: float | None = None
    spread: float | None = None
    relative: float | None = None
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
        self._lock = FileLock(path.with_name(path.name + ".lock"), timeout=0)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            if path.exists() and path.stat().st_size:
                self.entries, whole = _read(path)
                if whole < path.stat().st_size:
                    os.truncate(path, whole)
            self._file: IO[bytes] = path.open("ab")
            if not self._file.tell():
                self._append({"schema": SCHEMA, "journal": "warploom tune"})
        except Timeout as error:
            raise RecordsError(
                f"{path}: in use",
                rule="one run at a time appends to a journal",
                fix="wait for the other run, or give another --journal",
            ) from error
        except OSError as error:
            raise RecordsError(
                f"{path}: cannot be written",
                rule=error.strerror or str(error),
                fix="give another --journal",
            ) from error

    def add(self, entry: Entry) -> None:
        """Append an entry; it is on disk when this returns."""
        self.entries.append(entry)
        self._append(_plain(entry))

    def known(self, operation: Operation, shape: Shape, here: Environment) -> list[Result]:
        """The results of a problem in this environment, in the order in which they came."""
        return [
            entry.result
            for entry in self.entries
            if (entry.operation, entry.shape) == (operation, shape)
            and not entry.environment.differences(here)
        ]

    def close(self) -> None:
        """Close the file, and let others have it."""
        self._file.close()
        self._lock.release()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read(path: Path) -> list[Entry]:
    """Read a journal. RecordsError for a file that is none; a last line cut short is left out."""
    try:
        return _read(path)[0]
    except OSError as error:
        raise RecordsError(
            f"{path}: cannot be read", rule=error.strerror or str(error), fix="check the path"
        ) from error


def measurements(
    *journals: Iterable[Entry], results: Iterable[Measurement] = ()
) -> list[Measurement]:
    """What the model is fitted from: one time for each correct schedule of each problem.

    Clocks drift between loops, and more between runs (one product took 35 and 42 us), so that is
    the median of its relative times in all journals, times the median of what they are relative to:
    the default, which each journal has first of a problem. Where journals had different defaults,
    the schedules that both measured tell how their times compare. A search keeps the GPU at its
    limit of power, where attention takes 5 to 16 % longer than beside slower peers: where `results`
    of benchmarks have a schedule of a problem, all its times are brought to their scale.
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
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    lines = content[:whole].splitlines()
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            if number > 1:
                entries.append(_entry(fields))
            elif fields["schema"] != SCHEMA:
                raise ValueError(f"schema {fields['schema']}, this version reads {SCHEMA}")
        except (ValueError, KeyError, TypeError, AttributeError, WarploomError) as error:
            raise RecordsError(
                f"{path}:{number}: {error}",
                rule="a journal is one JSON object to a line, as `warploom tune` writes it",
                fix="it was left as it is: move it away, or give another --journal",
            ) from error
    return entries, whole


def _plain(entry: Entry) -> dict[str, Any]:
    result = asdict(entry.result)
    schedule = result.pop("schedule")
    return {
        "operation": asdict(entry.operation),
        "shape": asdict(entry.shape),
        "environment": asdict(entry.environment),
        "schedule": schedule,
        **{name: value for name, value in result.items() if value not in (None, "", False)},
    }


def _entry(fields: dict[str, Any]) -> Entry:
    operation = restore_operation(fields.pop("operation"))
    shape = restore(cast("Any", shape_type(operation.family)), fields.pop("shape"))
    environment = Environment(**fields.pop("environment"))
    schedule = restore(family(operation.family).schedule, fields.pop("schedule"))
    result = Result(schedule, **fields)
    times = (result.seconds, result.spread, result.relative)
    if result.outcome not in get_args(Outcome) or (result.outcome == "correct") != (
        result.seconds is not None
    ):
        raise ValueError(f"outcome {result.outcome!r} with seconds {result.seconds}")
    if not all(time is None or (math.isfinite(time) and time >= 0) for time in times):
        raise ValueError(f"times {times}")
    return Entry(operation, shape, environment, result)
