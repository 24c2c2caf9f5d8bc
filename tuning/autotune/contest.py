"""Which of a few kernels is the fastest for a problem, within a budget of GPU time.

Kernels take turns, a launch each, behind a flush of the L2 cache and a pause: as they run between
the other kernels of a model (runtime/alone.py). What comes first is begun, one kernel after the
other, as long as there is time left to compare two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Protocol, TypeVar

from warploom.generator.specification import KernelSpec
from warploom.printable import first_line
from warploom.runtime.measure import Call, Timing

TIE = 0.02  # of its time, within which the present kernel stays
ROUNDS, FEWEST = 12, 3  # of those left in the end
SCREENED = 2  # rounds after which only those close to the fastest stay:
CLOSE = 1.10
LONG = 1e-3  # seconds: of longer launches the first is a time, and so many rounds are enough
SHORT = 1e-4  # seconds: longer launches on further operands are first made in the rounds
PAUSE = (2e-5, 1e-3)  # seconds: as long as the kernel takes, within these
FLUSH = 1e-4  # seconds, about, with the host's time for a turn
LAP = 4e-4  # seconds, about, that a lap takes beside its turns

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
    differs   runs a kernel and says how far its results are off, as a share of what they may be;
              it is asked about the present one first, which has just run, to keep its results
    compared  seconds, about, of a comparison beside its launch, before there was one
    """

    present: KernelSpec
    kept: Sequence[KernelSpec]
    calls: Callable[[KernelSpec], Sequence[Call]]
    differs: Callable[[KernelSpec], float]
    stage: Stage
    budget: float
    spent: float = 0.0
    compared: float = 0.0
    failed: dict[KernelSpec, str] = field(default_factory=dict)
    _calls: dict[KernelSpec, Sequence[Call]] = field(default_factory=dict)
    _seconds: dict[KernelSpec, float] = field(default_factory=dict)  # of one launch, so far
    _right: set[KernelSpec] = field(default_factory=set)
    _comparison: float | None = None  # seconds that one took, which the end may need again

    def run(self, candidates: Sequence[KernelSpec]) -> Measured:
        """Measure the candidates. NotMeasured where the budget does not suffice for any."""
        every = list(dict.fromkeys([self.present, *self.kept, *candidates]))
        for spec in every:
            if self._over or not self._room:
                break
            self._begin(spec)
        if self.present in self.failed:
            raise NotMeasured(self.failed[self.present])
        if len(self.failed) == len(every) - 1:
            raise NotMeasured("there is nothing to compare its kernel with")
        rounds = self._rounds(self._field())
        timings = {spec: Timing(tuple(taken)) for spec, taken in rounds.items()}
        return Measured(self._winner(timings), timings, self.spent, self.failed)

    def _begin(self, spec: KernelSpec) -> None:
        """Load a kernel and time it once; without a time where the budget is spent meanwhile."""
        try:
            calls = self.calls(spec)
            taken = self._launch(calls[0])
            if self._over:
                return
            if spec == self.present:
                self.differs(spec)
            if taken <= LONG:
                (taken,), spent = self.stage.lap([Turn(calls[0], PAUSE[0])])
                self.spent += spent
        except Exception as error:
            self.failed[spec] = first_line(error)
            return
        if taken < SHORT:  # the other sets' launches are bound to their addresses, too
            for call in calls[1:]:
                if self._over:
                    return
                self._launch(call)
        self._calls[spec], self._seconds[spec] = calls, taken

    def _launch(self, call: Call) -> float:
        taken = self.stage.launched(call)
        self.spent += taken
        return taken

    @property
    def _over(self) -> bool:
        """Whether the budget is spent: nothing more is launched."""
        return self.spent >= self.budget

    @property
    def _short(self) -> NotMeasured:
        taken = self._seconds.get(self.present, 0.0)
        long = f", where a launch takes {taken * 1e3:.1f}" if taken > LONG else ""
        return NotMeasured(f"{self.budget * 1e3:g} ms of GPU time do not suffice{long}")

    @property
    def _room(self) -> bool:
        """Whether another kernel can be begun, and two of the present one's time be compared."""
        if self.present not in self._seconds:
            return self.present not in self.failed
        one = self._seconds[self.present]
        begun = one if one > LONG else LAP + FLUSH + 2 * one
        return self.spent + begun + self._end([self.present] * 2) <= self.budget

    def _field(self) -> list[KernelSpec]:
        """The kernels that there is time for: the slowest go first, the present one never."""
        found = sorted(self._seconds, key=lambda spec: self._seconds[spec])
        if self.present not in found:
            raise self._short
        while len(found) > 1 and self.spent + self._end(found) > self.budget:
            found.remove([spec for spec in found if spec != self.present][-1])
        if found == [self.present]:
            raise self._short
        return found

    @property
    def _fewest(self) -> int:
        """Rounds that are worth a comparison."""
        return SCREENED if self._seconds[self.present] > LONG else FEWEST

    def _end(self, running: Sequence[KernelSpec]) -> float:
        """The GPU seconds, about, of as few rounds as there may be and of comparing results."""
        return self._fewest * self._cost(running) + self._last

    @property
    def _last(self) -> float:
        """The GPU seconds, about, of comparing the results of one more kernel."""
        if self._comparison is not None:
            return self._comparison
        return self.compared + self._seconds[self.present]

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
                number >= self._fewest
                and self.spent + self._cost(running) + self._last > self.budget
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
        return LAP + sum(
            self._turn(spec, 0).pause + FLUSH + self._seconds[spec] for spec in running
        )

    def _winner(self, timings: Mapping[KernelSpec, Timing]) -> KernelSpec:
        """The fastest whose results are right; the present one where that is no faster."""
        medians = {spec: timing.median for spec, timing in timings.items()}
        best = self._fastest(medians)
        return best if medians[best] <= (1 - TIE) * medians[self.present] else self.present

    def _fastest(self, seconds: Mapping[KernelSpec, float]) -> KernelSpec:
        """The fastest whose results are right, as the present one's are taken to be.

        NotMeasured where nothing was compared that is faster, and there is no time to.
        """
        for spec in sorted(seconds, key=lambda spec: seconds[spec]):
            if spec == self.present or spec in self._right:
                return spec
            if spec in self.failed:
                continue
            if self._over:
                if not self._right and seconds[spec] <= (1 - TIE) * seconds[self.present]:
                    raise self._short  # it may well be the fastest
                continue
            share, self._comparison = self.stage.timed(partial(self.differs, spec))
            self.spent += self._comparison
            if share <= 1:
                self._right.add(spec)
                return spec
            self.failed[spec] = f"WRONG RESULT: off by {share:.3g} times what is allowed"
        return self.present
