"""The search for one problem's best schedule: what to measure next, and which one wins.

The model's first choices come first, then the neighbours of the best so far as long as they gain,
then the finalists once more, longer, in one loop with the untuned default. Nothing here measures;
the same results lead to the same choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from operator import ne
from typing import Any

from warploom.generator.knob import ANY, knobs
from warploom.generator.model import Prediction, proposals
from warploom.generator.model.predict import preference
from warploom.generator.records import RUNNERS_UP, Timed
from warploom.generator.specification import KernelSpec
from warploom.tuning.journal import Result

FIRST = 12  # of the model's choices
NEIGHBOURS = 12  # measured in one generation, of this many of the best:
PARENTS = 2
GENERATIONS, IDLE = 6, 2  # at most so many, and so many without a gain of time, of at least:
GAIN = 0.003
FINALISTS = 4
NEAR = 1.05  # of the best: who may be a finalist
TIE, WIDEST_TIE = (
    0.01,
    0.03,
)  # times this close are equal, and so is what noise hides, up to a bound

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
        near = [spec for one in parents for spec in self._steps.near(one, self.results)]
        return list(dict.fromkeys(near))[:NEIGHBOURS]

    @cached_property
    def _steps(self) -> _Steps:
        """What is near in the space: looked at when GPUs measure, and not before they do."""
        return _Steps(self.space)

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
        """The fastest, or who comes first in a fixed order of those tied with it.

        The default comes first, since it costs no kernel of its own; then the model's preference.
        """
        found = self.contenders()
        if not found:
            return None

        def time(spec: KernelSpec) -> float:
            return found[spec].relative or found[spec].seconds or float("inf")

        fastest = min(found, key=lambda spec: (time(spec), spec.canonical_json))
        tied = [
            spec
            for spec in found
            if time(spec) <= time(fastest) * (1 + band(found[spec], found[fastest]))
        ]
        return min(tied, key=lambda spec: (spec != self.default, *preference(spec)))

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


def band(one: Result, other: Result) -> float:
    """How close two relative times must be to be equal: what their spreads hide, within bounds."""
    noise = ((one.spread or 0.0) + (other.spread or 0.0)) / 2
    return min(WIDEST_TIE, max(TIE, noise))


class _Steps:
    """What it is to be near in a space: one field apart, by at most two of its values there.

    A search asks for the neighbours of few specs among thousands: what is known of these is kept.
    """

    def __init__(self, space: Sequence[KernelSpec]) -> None:
        self._space = space
        self._places = {spec: place for place, spec in enumerate(space)}
        self._parts = [_parts(spec) for spec in space]
        names = self._parts[0] if space else {}
        said = knobs(type(space[0].schedule)) if space else {}
        self._leads = {name: said[name].follows or name for name in names if name in said}
        self._values = {name: sorted({_sortable(p[name]) for p in self._parts}) for name in names}
        self._coupled: dict[str, list[str]] = {}
        for name in names:
            if (lead := self._leads.get(name, name)) != ANY:
                self._coupled.setdefault(lead, []).append(name)
        self._groups = [self._grouped(parts) for parts in self._parts]

    def near(self, one: KernelSpec, but: Iterable[KernelSpec]) -> list[KernelSpec]:
        """The specs of the space that are near one, in their order, but for some."""
        left_out = {self._places.get(spec) for spec in but}
        mine = _parts(one)
        groups = self._grouped(mine)
        close = [  # most of a space is not, and this says so without a look at its fields
            place for place, its in enumerate(self._groups) if sum(map(ne, groups, its)) <= 1
        ]
        return [
            self._space[place]
            for place in close
            if place not in left_out and self._adjacent(mine, self._parts[place])
        ]

    def _grouped(self, parts: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
        """The values of each field and of what is coupled to it."""
        return tuple(tuple(parts.get(name) for name in names) for names in self._coupled.values())

    def adjacent(self, one: KernelSpec, other: KernelSpec) -> bool:
        """True when two specs, of the space or not, are near."""
        return self._adjacent(_parts(one), _parts(other))

    def _adjacent(self, mine: Mapping[str, Any], its: Mapping[str, Any]) -> bool:
        """True when the two differ in one field, or what is coupled to it, by a step or two."""
        differing = [name for name, value in mine.items() if value != its.get(name)]
        moved = [name for name in differing if self._leads.get(name) != ANY]
        if not differing or len({self._leads.get(name, name) for name in moved}) > 1:
            return False
        return all(self._close(name, mine[name], its[name]) for name in moved)

    def _close(self, name: str, one: object, other: object) -> bool:
        if not isinstance(one, int) or isinstance(one, bool):
            return True
        values = self._values[name]
        low, high = sorted((_sortable(one), _sortable(other)))
        return sum(low < value < high for value in values) <= 1


def _parts(spec: KernelSpec) -> dict[str, Any]:
    """A schedule's fields, a tile's extents each by itself."""
    found: dict[str, Any] = {}
    for field in fields(spec.schedule):
        value = getattr(spec.schedule, field.name)
        if field.name == "tile":
            found |= {f"tile {index}": extent for index, extent in enumerate(value)}
        else:
            found[field.name] = value
    return found


def _sortable(value: object) -> tuple[str, float, str]:
    number = float(value) if isinstance(value, int | float) else 0.0
    return type(value).__name__, number, str(value)
