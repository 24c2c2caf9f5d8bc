"""Measured times of an operation's kernels: of tuned configs, or of a tuner's journal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from warploom.generator import records_file
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation, Schedule


@dataclass(frozen=True, slots=True)
class Timing:
    """What one schedule of an operation took for one shape."""

    gpu: str
    shape: Shape
    schedule: Schedule
    seconds: float
    measured: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """The timings of one shape on one GPU, the fastest first."""

    gpu: str
    shape: Shape
    timings: tuple[Timing, ...]

    def of(self, schedule: Schedule) -> Timing | None:
        """The timing of a schedule; None where it was not timed for this shape."""
        return next((one for one in self.timings if one.schedule == schedule), None)


def problems(spec: KernelSpec, journal: Path | None = None) -> list[Problem]:
    """Return all timings of a kernel's operation, by GPU and shape.

    Args:
        spec: The kernel; its schedule need not be among those that were timed.
        journal: Of `warploom tune`; without one, the tuned configs that came with the package and
            the user's own are read.

    Raises:
        RecordsError: A file that cannot be read, or is none.
    """
    found: dict[tuple[str, Shape], dict[Schedule, Timing]] = {}
    every = _of_journal(journal, spec.operation) if journal else _of_records(spec.operation)
    for one in every:
        found.setdefault((one.gpu, one.shape), {})[one.schedule] = one
    return [
        Problem(gpu, shape, tuple(sorted(timed.values(), key=lambda one: one.seconds)))
        for (gpu, shape), timed in sorted(found.items(), key=lambda one: one[0])
    ]


def _of_records(operation: Operation) -> Iterator[Timing]:
    for path in records_file.every():
        for record in records_file.read(path):
            if record.operation == operation:
                for timed in record.contenders:
                    gpu, when = record.environment.gpu, record.measured
                    yield Timing(gpu, record.shape, timed.schedule, timed.seconds, when)


def _of_journal(path: Path, operation: Operation) -> Iterator[Timing]:
    from warploom.tuning.journal import read

    for entry in read(path):
        seconds = entry.result.seconds
        if entry.operation == operation and seconds is not None:
            yield Timing(entry.environment.gpu, entry.shape, entry.result.schedule, seconds)
