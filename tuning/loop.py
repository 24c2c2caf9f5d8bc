"""A loop over kernels that take turns, until their times are known as well as asked.

Clocks move the times of all kernels of a round, noise each time by itself: single launches of 20 us
are 2 to 3 % off either way, those of 2 ms 0.3 % (an H100's journals, 2026-11-26). So what all have
in common of a round is taken out of its times, and few rounds tell much of what is long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import hypot, pi, sqrt
from operator import mul
from statistics import median

from warploom.runtime.measure import Sampler, Timing, interleave
from warploom.tuning.search import NEAR

DISCARDED = 1  # rounds that go before those that count, of which there are:
FEWEST, MOST = 8, 101
LONGEST = 0.5  # seconds for all rounds beyond the fewest, by what those before took
LEAST_SPREAD = 1e-3  # that a few rounds may have by chance, too
UNSTEADY = 0.05  # of a round's pace: a spread, or a drift from first to last, that throttling makes
# The standard error of what no rounds average out, such as where buffers lie: times of a kernel in
# two loops are 0.5 to 0.7 % apart, and by their rounds 0.1 to 0.4 % (an H100, 2026-11-26).
BETWEEN = 0.003
# The standard error of a median of normal times, for a distance of the quartiles of one.
OF_SPREAD = sqrt(pi / 2) / 1.349


class Loop:
    """The times of kernels, by name; the first is what the others are relative to.

    unsteady   clocks moved during the loop, as far as the times tell
    """

    def __init__(self, timings: Mapping[str, Timing]) -> None:
        self._timings = timings
        self._anchor = next(iter(timings))
        self._says = _says(timings)
        pace = _pace(timings, self._says)
        self.unsteady = _unsteady(Timing(pace))
        if len(timings) == 1:  # of whose times nobody can say what is the clock's
            pace = (1.0,) * len(pace)
        self._own = {
            name: Timing(tuple(x / share for x, share in zip(timing.rounds, pace, strict=True)))
            for name, timing in timings.items()
        }

    @property
    def rounds(self) -> int:
        """How many counted."""
        return len(self._timings[self._anchor].rounds)

    def seconds(self, name: str) -> float:
        """The median time of a kernel."""
        return self._timings[name].median

    def relative(self, name: str) -> float:
        """The time of a kernel over that of the first."""
        return 1.0 if name == self._anchor else self._median(name) / self._median(self._anchor)

    def spread(self, name: str) -> float:
        """The distance between the quartiles of a kernel's times, relative to the median."""
        return self._own[name].spread

    def error(self, name: str) -> float:
        """The standard error of a kernel's time, relative to it, from loop to loop."""
        return hypot(self._own_error(name), BETWEEN)

    @property
    def largest_error(self) -> float:
        """Within this loop, of the first kernel and of those that could be finalists."""
        limit = NEAR * min(map(self._median, self._own))
        near = [name for name in self._own if self._median(name) <= limit]
        return max(map(self._own_error, {self._anchor, *near}))

    def _own_error(self, name: str) -> float:
        """What more rounds would make less of.

        What a kernel has said itself of a round's pace is missing in its spread.
        """
        left = 1 - self._says[name] if len(self._says) > 1 else 1.0
        return OF_SPREAD * self.spread(name) / sqrt(self.rounds * left)

    def _median(self, name: str) -> float:
        return self._own[name].median


def loop(
    samplers: Mapping[str, Sampler],
    precision: float,
    clock: Callable[[], float] = time.monotonic,
) -> Loop:
    """Sample in turns until no time that matters has a standard error of more than `precision`.

    That is a share of the time. Noise may be so much that MOST rounds do not suffice, or LONGEST.
    A kernel alone is its own clock: it takes twice the rounds to tell noise from that.
    """
    rounds: dict[str, tuple[float, ...]] = dict.fromkeys(samplers, ())
    more, before, begun = FEWEST * (2 if len(samplers) == 1 else 1), DISCARDED, clock()
    while True:
        taken = interleave(samplers, rounds=before + more, discarded=before)
        rounds = {name: (*rounds[name], *timing.rounds) for name, timing in taken.items()}
        found = Loop({name: Timing(times) for name, times in rounds.items()})
        spent = clock() - begun
        fitting = int((LONGEST - spent) / max(spent, 1e-9) * found.rounds)
        more, before = min(found.rounds, MOST - found.rounds, fitting), 0
        if more <= 0 or found.largest_error <= precision:
            return found


def _says(timings: Mapping[str, Timing]) -> dict[str, float]:
    """How much of a say in a round's pace each kernel has, in all 1: the more, the less noise."""
    says = {name: max(timing.spread, LEAST_SPREAD) ** -2 for name, timing in timings.items()}
    return {name: say / sum(says.values()) for name, say in says.items()}


def _pace(timings: Mapping[str, Timing], says: Mapping[str, float]) -> tuple[float, ...]:
    """How long each round took, beside the usual, by what all kernels say of it."""
    shares = [says[name] / timing.median for name, timing in timings.items()]
    rounds = zip(*(timing.rounds for timing in timings.values()), strict=True)
    return tuple(sum(map(mul, times, shares)) for times in rounds)


def _unsteady(pace: Timing) -> bool:
    third = max(1, len(pace.rounds) // 3)
    first, last = median(pace.rounds[:third]), median(pace.rounds[-third:])
    return pace.spread > UNSTEADY or abs(last / first - 1) > UNSTEADY
