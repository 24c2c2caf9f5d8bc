"""The search for one problem's best schedule: what to measure next, and which one wins.

The model's first choices come first, then the neighbours of the best so far as long as they gain,
then the finalists once more, longer, in one loop with the untuned default. Nothing here measures;
the same results lead to the same choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import hypot

from warploom.generator.model import Prediction, proposals
from warploom.generator.model.predict import preference
from warploom.generator.records import RUNNERS_UP, Timed
from warploom.generator.specification import KernelSpec
from warploom.tuning.journal import Result
from warploom.tuning.steps import Steps, steps

FIRST = 12  # of the model's choices
NEIGHBOURS = 12  # measured in one generation, of this many of the best:
PARENTS = 2
GENERATIONS, IDLE = 6, 2  # at most so many, and so many without a gain of time, of at least:
GAIN = 0.003
FINALISTS = 6
NEAR = 1.05  # of the fastest: who may be a finalist, and whose time must be known well
TIE = 0.01  # by less a kernel is not worth one of its own beside the default
# By how many standard errors, up to a share, two times must be apart. With two errors what is usual
# wins over what is faster: 0.52 % behind the best of 17 runs, with one 0.43 (H100, 2026-11-26).
SURE, WIDEST_TIE = 1.0, 0.03

Stage = str  # first, neighbours, final, done


class Search:
    """One problem's search.

    ranked   every legal spec of the space as the model ranks it
    hints    specs that come first of all, such as what a near record has
    known    results of earlier runs, which are not measured again
    """

    def __init__(
        self,
        default: KernelSpec,
        ranked: Sequence[Prediction],
        hints: Iterable[KernelSpec] = (),
        known: Iterable[Result] = (),
        *,
        exhaustive: bool = False,
    ) -> None:
        self.default = default
        self.space = [one.spec for one in ranked]
        self.stage: Stage = "first"
        self.results: dict[KernelSpec, Result] = {}
        self.finals: dict[KernelSpec, Result] = {}
        self._exhaustive = exhaustive
        first = self.space if exhaustive else proposals(ranked, FIRST)
        self._first = list(dict.fromkeys([*hints, *first]))
        self._generation = self._idle = 0
        self._before = float("inf")
        by_schedule = {spec.schedule: spec for spec in (*self.space, *self._first, default)}
        known = list(known)
        anchored = any(
            one.schedule == default.schedule and one.relative in (None, 1.0) for one in known
        )
        for result in known:
            spec = by_schedule.get(result.schedule)
            # Times that are relative to another default say nothing; failures always do.
            if spec and (result.outcome != "correct" or (anchored and result.relative)):
                self.results[spec] = result

    # ---- What to do next -------------------------------------------------------------------------

    @property
    def ahead(self) -> list[KernelSpec]:
        """What will be measured whatever comes of it: worth compiling at once."""
        return [spec for spec in (self.default, *self._first) if spec not in self.results]

    def wanted(self, *, explore: bool = True) -> list[KernelSpec]:
        """What to measure next, the default first; empty where the search is done.

        Without `explore`, the finalists among what is known.
        """
        if not explore and self.stage in ("first", "neighbours") and self._correct():
            self.stage = "final"
        while self.stage in ("first", "neighbours"):
            found = self._first if self.stage == "first" else self._neighbours()
            new = [spec for spec in found if spec not in self.results and spec != self.default]
            if new or (self.stage == "first" and self.default not in self.results):
                return list(dict.fromkeys([*self._anchors(), *new[:FIRST]]))
            self._advance()
        if self.stage == "final":
            if finalists := self._finalists():
                return finalists
            self.stage = "done"
        return []

    def report(self, measured: Mapping[KernelSpec, Result]) -> None:
        """Take the results of what was wanted."""
        if self.stage == "final":
            # Later data may find what earlier data did not: one wrong result is enough.
            self.finals = dict(measured)
            self.results.update({s: r for s, r in measured.items() if r.outcome != "correct"})
            self.stage = "done"
            return
        self.results.update(measured)

    def _advance(self) -> None:
        if self.stage == "first" and not self._exhaustive and self.best is not None:
            self.stage = "neighbours"
        else:
            self.stage = "final"

    # ---- Candidates ------------------------------------------------------------------------------

    def _anchors(self) -> list[KernelSpec]:
        """What every loop begins with, and times are relative to: the default.

        Where that one fails it is what was right first in its place, and nothing before that.
        """
        found = self.results.get(self.default)
        if found is None or found.outcome == "correct":
            return [self.default]
        return [spec for spec in self._correct() if self.results[spec].relative == 1.0][:1]

    @property
    def best(self) -> KernelSpec | None:
        """The fastest that is known to be correct."""
        return min(self._correct(), key=self._order, default=None)

    def _correct(self) -> list[KernelSpec]:
        return [spec for spec, found in self.results.items() if found.outcome == "correct"]

    def _relative(self, spec: KernelSpec) -> float:
        found = self.results[spec]
        return found.relative or found.seconds or float("inf")

    def _order(self, spec: KernelSpec) -> tuple[float, str]:
        return self._relative(spec), spec.canonical_json

    def _neighbours(self) -> list[KernelSpec]:
        """Specs near the best ones, in the model's order, that were not measured; none at the end.

        The end is where generations, or those without a gain, have been enough.
        """
        parents = sorted(self._correct(), key=self._order)[:PARENTS]
        if not parents or self._generation >= GENERATIONS:
            return []
        now = self._relative(parents[0])
        self._idle = 0 if now < self._before * (1 - GAIN) else self._idle + 1
        self._before = min(now, self._before)
        if self._idle >= IDLE:
            return []
        self._generation += 1
        rank = self._places.__getitem__
        found = [sorted(self._steps.near(one, self.results), key=rank) for one in parents]
        near = [spec for some in found for spec in some]
        return list(dict.fromkeys(near))[:NEIGHBOURS]

    @cached_property
    def _steps(self) -> Steps:
        return steps(frozenset(self.space))

    @cached_property
    def _places(self) -> dict[KernelSpec, int]:
        """Where the model ranks each."""
        return {spec: place for place, spec in enumerate(self.space)}

    def _finalists(self) -> list[KernelSpec]:
        ranked = sorted(self._correct(), key=self._order)
        if not ranked:
            return []
        limit = NEAR * self._relative(ranked[0])
        anchors = self._anchors()
        close = [s for s in ranked if self._relative(s) <= limit and s not in anchors]
        return [*anchors, *close[:FINALISTS]]

    # ---- The winner ------------------------------------------------------------------------------

    def contenders(self) -> dict[KernelSpec, Result]:
        """The correct ones of the loop that decides, with their results.

        That is the final one or, where the budget did not reach it, what went before.
        """
        deciding = self.finals or self.results
        return {spec: found for spec, found in deciding.items() if found.outcome == "correct"}

    def winner(self) -> KernelSpec | None:
        """The default, where nothing is faster by more than a tie; else the fastest.

        Of those that noise alone keeps apart from the fastest, who comes first in a fixed order.
        """
        found = self.contenders()
        if not found:
            return None

        def time(spec: KernelSpec) -> float:
            return found[spec].relative or found[spec].seconds or float("inf")

        def tied(spec: KernelSpec, least: float) -> bool:
            hidden = band(found[spec], found[fastest], least)
            return time(spec) <= time(fastest) * (1 + hidden)

        fastest = min(found, key=lambda spec: (time(spec), spec.canonical_json))
        if self.default in found and tied(self.default, TIE):
            return self.default
        return min((spec for spec in found if tied(spec, 0.0)), key=preference)

    def stands(self, finals: Mapping[KernelSpec, Result]) -> bool:
        """True where the default is tied with every finalist that would be faster.

        Then it wins whatever a second GPU says: the slower of two opinions counts, and what they
        differ by is noise.
        """
        own = finals.get(self.default)
        if own is None or own.outcome != "correct" or own.relative != 1.0:
            return False
        found = [one for one in finals.values() if one.outcome == "correct"]
        return all(one.relative and one.relative * (1 + band(own, one)) >= 1 for one in found)

    def rivals(self, finals: Mapping[KernelSpec, Result]) -> list[KernelSpec]:
        """The anchor of a loop of finalists and who is tied with its fastest: one of them wins."""
        right = {spec: one for spec, one in finals.items() if one.outcome == "correct"}
        fastest = min(right.values(), key=lambda one: one.relative or float("inf"))
        limit = fastest.relative or float("inf")
        return [
            spec
            for place, (spec, one) in enumerate(right.items())
            if place == 0 or (one.relative or limit) <= limit * (1 + band(one, fastest))
        ]

    def timed(self) -> tuple[Timed, Timed | None, tuple[Timed, ...]] | None:
        """The winner, the default and the runners-up with their times; None without a winner.

        Times are relative ones times the anchor's, so that they compare although clocks drift.
        """
        found, best = self.contenders(), self.winner()
        if best is None:
            return None
        scale = next((r.seconds for r in found.values() if r.relative == 1.0 and r.seconds), None)

        def timed(spec: KernelSpec) -> Timed:
            one = found[spec]
            seconds = one.relative * scale if scale and one.relative else one.seconds or 0.0
            return Timed(spec.schedule, seconds, one.spread or 0.0)

        ordered = sorted(found, key=lambda spec: (timed(spec).seconds, spec.canonical_json))
        others = [spec for spec in ordered if spec not in (best, self.default)]
        default = timed(self.default) if self.default in found else None
        return timed(best), default, tuple(map(timed, others[:RUNNERS_UP]))


def band(one: Result, other: Result, least: float = TIE) -> float:
    """How close two times must be to be tied: what their errors hide, within bounds."""
    return min(WIDEST_TIE, max(least, SURE * hypot(one.error or 0.0, other.error or 0.0)))
