"""A recorded sweep in place of a GPU: what it says of a kernel is what comes of it again.

The whole tuner runs on it without a GPU: its choices are held against a sweep that knows all
schedules. Noise may be added, the same for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import Future

from warploom.errors import RecordsError
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation, Schedule
from warploom.tuning.gpu import About, Batch
from warploom.tuning.journal import Entry, Result, measurements


class Replay:
    """Plays the entries of one environment's journal back as a Gpu.

    noise   standard deviation of a relative time
    """

    def __init__(self, entries: Iterable[Entry], *, noise: float = 0.0, seed: int = 0) -> None:
        entries = list(entries)
        if not entries:
            raise RecordsError(
                "a sweep without an entry", rule="a sweep has results", fix="record one"
            )
        environments = {entry.environment for entry in entries}
        if len({(e.gpu, e.multiprocessors, e.nvrtc) for e in environments}) > 1:
            raise RecordsError(
                "a sweep of several environments",
                rule="what is played back is of one GPU kind and compiler",
                fix="give the journal of one run",
            )
        self.environments = {one.operation.family: one.environment for one in entries}
        self._noise, self._random = noise, random.Random(seed)  # noqa: S311
        self._results: dict[tuple[Operation, Shape, Schedule], Result] = {
            (one.operation, one.shape, one.result.schedule): one.result for one in entries
        }
        self._seconds = {
            (one.operation, one.shape, one.schedule): one.seconds for one in measurements(entries)
        }

    @property
    def about(self) -> About:
        """The GPU that the sweep is of."""
        environment = next(iter(self.environments.values()))
        return About(environment.gpu, environment.multiprocessors)

    def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
        """Return what the sweep has of every kernel; what it lacks does not launch."""
        found: dict[KernelSpec, Result] = {}
        anchor: float | None = None
        for spec in batch.specs:
            key = (batch.operation, batch.shape, spec.schedule)
            swept, seconds = self._results.get(key), self._seconds.get(key)
            if swept is None:
                reason = "the sweep has no measurement of it"
                found[spec] = Result(spec.schedule, "launch error", reason=reason)
            elif seconds is None:
                found[spec] = swept
            else:
                anchor = seconds if anchor is None else anchor
                relative = 1.0 if seconds is anchor else seconds / anchor * self._jitter()
                times = (anchor * relative, swept.spread or 0.0, relative, swept.error)
                found[spec] = Result(spec.schedule, "correct", *times)
        return found

    def _jitter(self) -> float:
        return 1 + self._random.gauss(0, self._noise) if self._noise else 1.0

    def close(self) -> None:
        """Nothing is to be ended."""


class NoCompiler:
    """In place of the compiler where nothing is run."""

    def submit(self, spec: KernelSpec) -> Future[None]:
        """Return what is done already."""
        done: Future[None] = Future()
        done.set_result(None)
        return done
