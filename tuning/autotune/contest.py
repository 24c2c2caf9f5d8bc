"""Which of a few kernels is the fastest for a problem, within a budget of GPU time.

Kernels take turns, a launch each, behind a flush of the L2 cache and a pause: as they run between
the other kernels of a model (runtime/alone.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Protocol, TypeVar

from warploom.generator.specification import KernelSpec
from warploom.runtime.measure import Call, Timing

TIE = 0.02  # of its time, within which the present kernel stays
ROUNDS, FEWEST = 12, 3  # of those left in the end
SCREENED = 2  # rounds after which only those close to the fastest stay:
CLOSE = 1.10
SHORT = 1e-4  # seconds: longer launches on further operands are first made in the rounds
PAUSE = (2e-5, 1e-3)  # seconds: as long as the kernel takes, within these
FLUSH = 1e-4  # seconds, about, with the host's time for a turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """A launch behind a flush and a pause, in seconds."""

    call: Call
    pause: float


class Stage(Protocol):
    """What runs and times launches."""

    def lap(self, turns: Sequence[Turn]) -> tuple[list[float], float]:
        """Return the seconds of each launch, and the GPU's seconds for all of it."""
        ...

    def timed(self, act: Callable[[], T]) -> tuple[T, float]:
        """Return what `act` returns, and the GPU's seconds for it."""
        ...

    def launched(self, call: Call) -> float:
        """Make a launch for the first time; the GPU's seconds for it, not the host's."""
        ...


class NotMeasured(Exception):
    """A problem cannot be measured; the text says why, to be read after "not tuned: "."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it: the times of kernels that were run to the end, and GPU seconds."""

    winner: KernelSpec
    timings: Mapping[KernelSpec, Timing]
    spent: float
    failed: Mapping[KernelSpec, str]


@dataclass
class Contest:
    """One problem's kernels on one stage.

    present   what calls run now; it stays where none is faster by more than a tie
    kept      what is timed to the end however slow it is: what records are relative to
    calls     the launches of a kernel, one for each set of operands; WarploomError and
              RuntimeError where it cannot be launched
    differs   runs a kernel and says how far its results are off, as a share of what they may be
    """

    present: KernelSpec
    kept: Sequence[KernelSpec]
    calls: Callable[[KernelSpec], Sequence[Call]]
    differs: Callable[[KernelSpec], float]
    stage: Stage
    budget: float
    spent: float = 0.0
    failed: dict[KernelSpec, str] = field(default_factory=dict)
    _calls: dict[KernelSpec, Sequence[Call]] = field(default_factory=dict)
    _seconds: dict[KernelSpec, float] = field(default_factory=dict)  # of one launch, so far
    _right: set[KernelSpec] = field(default_factory=set)
    _comparison: float = 0.0  # seconds that one took, which the end may need again

    def run(self, candidates: Sequence[KernelSpec]) -> Measured:
        """Measure the candidates. NotMeasured where the budget does not suffice for any."""
        every = list(dict.fromkeys([self.present, *self.kept, *candidates]))
        for spec in every:
            if self._over or not self._begin(spec):
                break
        if self.present in self.failed:
            raise NotMeasured(self.failed[self.present])
        if self.present not in self._seconds:
            raise self._short
        rounds = self._rounds(self._field(SCREENED))
        timings = {spec: Timing(tuple(taken)) for spec, taken in rounds.items()}
        return Measured(self._winner(timings), timings, self.spent, self.failed)

    def _begin(self, spec: KernelSpec) -> bool:
        """Load a kernel and time it once; False where there is no time for more."""
        try:
            calls = self.calls(spec)
            self._launch(calls[0])
            if self._over:
                return False
            (taken,), spent = self.stage.lap([Turn(calls[0], PAUSE[0])])
        except Exception as error:
            self.failed[spec] = (str(error) or type(error).__name__).splitlines()[0]
            return True
        self.spent += spent
        if taken < SHORT:  # the other sets' launches are bound to their addresses, too
            for call in calls[1:]:
                if self._over:
                    return False
                self._launch(call)
        self._calls[spec], self._seconds[spec] = calls, taken
        return self.spent + FEWEST * self._cost([self.present, spec]) < self.budget

    def _launch(self, call: Call) -> None:
        self.spent += self.stage.launched(call)

    @property
    def _over(self) -> bool:
        """Whether the budget is spent: nothing more is launched."""
        return self.spent >= self.budget

    @property
    def _short(self) -> NotMeasured:
        return NotMeasured(f"{self.budget * 1e3:g} ms of GPU time do not suffice")

    def _field(self, rounds: int) -> list[KernelSpec]:
        """The kernels that there is time for: the slowest go first, the present one never."""
        found = sorted(self._seconds, key=lambda spec: self._seconds[spec])
        while self.spent + max(rounds, FEWEST) * self._cost(found) > self.budget:
            leaving = [spec for spec in found if spec != self.present]
            if not leaving:
                raise self._short
            found.remove(leaving[-1])
        if found == [self.present]:
            raise NotMeasured("there is nothing to compare its kernel with")
        return found

    def _rounds(self, running: list[KernelSpec]) -> dict[KernelSpec, list[float]]:
        """The times of those that stay to the end, in as many rounds as there is time for."""
        taken: dict[KernelSpec, list[float]] = {spec: [] for spec in running}
        shuffled = random.Random(0)  # noqa: S311 (no secret)
        for number in range(ROUNDS):
            if number == SCREENED:
                medians = {spec: median(taken[spec]) for spec in running}
                limit = CLOSE * medians[self._fastest(medians)]
                stay = {self.present, *self.kept}
                running = [s for s in running if s in stay or medians[s] <= limit]
                running = [s for s in running if s not in self.failed]
            if self._over and number < SCREENED:
                raise self._short
            if self._over or (
                number >= FEWEST
                and self.spent + self._cost(running) + self._comparison > self.budget
            ):
                break
            shuffled.shuffle(running)
            seconds, spent = self.stage.lap([self._turn(spec, number) for spec in running])
            self.spent += spent
            for spec, one in zip(running, seconds, strict=True):
                taken[spec].append(one)
        return {spec: taken[spec] for spec in running}

    def _turn(self, spec: KernelSpec, number: int) -> Turn:
        calls = self._calls[spec]
        return Turn(calls[number % len(calls)], min(max(PAUSE[0], self._seconds[spec]), PAUSE[1]))

    def _cost(self, running: Sequence[KernelSpec]) -> float:
        """The GPU seconds of a round, about."""
        return sum(self._turn(spec, 0).pause + FLUSH + self._seconds[spec] for spec in running)

    def _winner(self, timings: Mapping[KernelSpec, Timing]) -> KernelSpec:
        """The fastest whose results are right; the present one where that is no faster."""
        medians = {spec: timing.median for spec, timing in timings.items()}
        best = self._fastest(medians)
        return best if medians[best] <= (1 - TIE) * medians[self.present] else self.present

    def _fastest(self, seconds: Mapping[KernelSpec, float]) -> KernelSpec:
        """The fastest whose results are right, as the present one's are taken to be."""
        for spec in sorted(seconds, key=lambda spec: seconds[spec]):
            if spec == self.present or spec in self._right:
                return spec
            if spec in self.failed or self._over:
                continue
            share, self._comparison = self.stage.timed(partial(self.differs, spec))
            self.spent += self._comparison
            if share <= 1:
                self._right.add(spec)
                return spec
            self.failed[spec] = f"WRONG RESULT: off by {share:.3g} times what is allowed"
        return self.present
