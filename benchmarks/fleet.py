"""Cells on the GPUs of a cluster, each wholly on one of them; what was found is known here alone.

A cell is handed out until it has come back once. What was lost with its GPU goes to another, like
what ended the process that measured it; at the second time, that is what became of the cell.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import date
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast

from benchmarks import runner, worker
from benchmarks.families import Asked, Case, families
from warploom.cli import engines
from warploom.errors import DeviceError
from warploom.generator.launches import DeviceLimits
from warploom.generator.records import LONGEST, SHORTEST
from warploom.printable import brief
from warploom.runtime.contest import Cell, Entry, Floor
from warploom.runtime.records import environment, nvrtc
from warploom.tuning.bench import sound
from warploom.tuning.fleet.cells import LIMIT, CellGpu, CellMeasurer, cell_process, deciding
from warploom.tuning.fleet.members import Fleet, Member

TRIES = 2  # of a cell that ends what measures it
Told = dict[str, Any]


class Cells:
    """The cells of a run, measured on a cluster.

    machine   what the GPUs are, and what else they have that decides their times
    states    clocks and so on of each GPU that measured: after its first cell, after its last one
    """

    def __init__(
        self,
        using: engines.Engines,
        fleet: Fleet,
        names: Sequence[str],
        asked: Asked,
        cases: Sequence[Case],
    ) -> None:
        self._fleet, self._names, self._asked, self._cases = fleet, names, asked, cases
        own = {name: of for name, of in using.about.versions if name not in worker.OWN}
        self.machine = {"date": date.today().isoformat(), **own}
        self._left = deque(place for place, case in enumerate(cases) if case.gpu)
        self._measuring: dict[Future[Told], tuple[int, Member]] = {}
        self._ended: Counter[int] = Counter()
        self._last: dict[int, str] = {}  # who a cell ended at
        self.states: list[Told] = []
        self._states: dict[str, Told] = {}  # the last of each GPU
        self._events: SimpleQueue[None] = SimpleQueue()

    def measured(self) -> Iterator[tuple[int, Cell]]:
        """Measure all, in whatever order; each with its place. What needs no GPU comes first."""
        try:
            for place, case in enumerate(self._cases):
                if not case.gpu:
                    yield place, runner.measure(case, self._asked)
            while self._left or self._measuring:
                self._fleet.refresh(self._wake)
                for member in self._fleet.idle():
                    self._hand_out(member)
                with suppress(Empty):
                    self._events.get(timeout=1.0)
                for future, (place, member) in [*self._measuring.items()]:
                    if future.done() or member.gone:
                        del self._measuring[future]
                        if (cell := self._collected(place, member)) is not None:
                            yield place, cell
        finally:
            self._fleet.close()
            self.states += self._states.values()

    def _wake(self) -> None:
        self._events.put(None)

    def _hand_out(self, member: Member) -> None:
        """Give an idle GPU a cell: one that ended there only if there is no other GPU."""
        alone = not self._fleet.has_other(member.name)
        fit = (one for one in self._left if alone or self._last.get(one) != member.name)
        place = next(fit, None)
        if place is None:
            return
        self._left.remove(place)
        told = worker.request(self._names, self._asked, place, self._cases[place])
        work = partial(cast("CellGpu", member.gpu).cell, told)
        self._measuring[self._fleet.begin(member, work, self._wake)] = place, member

    def _collected(self, place: int, member: Member) -> Cell | None:
        """What became of a cell that has come back; None where it is to be measured again."""
        case = self._cases[place]
        outcome = self._fleet.outcome(member, partial(answered, case.name))
        if outcome is None:
            self._left.appendleft(place)
            return None
        if isinstance(outcome, str):
            self._ended[place] += 1
            self._last[place] = member.name
            if self._ended[place] < TRIES:
                self._left.append(place)
                return None
            return Cell(case.name, case.problem, (Entry("warploom", absent=outcome),), case.floor)
        cell, measured = outcome
        state = {"name": member.name, **measured}
        if member.name not in self._states:
            self.states.append(state)
        self._states[member.name] = state
        return cell


def answered(name: str, answer: Mapping[str, Any]) -> tuple[Cell, dict[str, Any]] | str:
    """The case that a GPU measured and the GPU's state; or why it ended what measures.

    An answer that is none of the case called `name` raises whatever is met first: then the GPU
    counts as failed.
    """
    if reason := answer.get("ended"):
        return str(reason)
    cell = restored(answer["cell"])
    times = [one.seconds for one in cell.entries if one.seconds is not None]
    possible = all(SHORTEST <= one <= LONGEST for one in times)
    if cell.name != name or not cell.entries or not possible:
        raise DeviceError(brief(answer["cell"]), rule=f"must be what was measured of {name}")
    return sound(cell), {**answer["state"]}


def restored(told: Mapping[str, Any]) -> Cell:
    """A cell from JSON as it stands in a document."""
    floor = Floor(**told["floor"]) if told["floor"] else None
    entries = tuple(Entry(**entry) for entry in told["entries"])
    return Cell(told["name"], told["problem"], entries, floor)


def opened(
    stack: ExitStack,
    address: str,
    count: int | None,
    kind: str | None,
    say: Any,  # noqa: ANN401 (a function that is told what nobody should miss)
    names: Sequence[str],
    asked: Asked,
    cases: Sequence[Case],
) -> Cells:
    """Connect to a cluster and to the first of its GPUs. Errors as `warploom tune --ray` has."""
    make = partial(cell_process, *deciding())
    using = engines.remote(
        *(stack, address, count, kind, None, say), measurer=CellMeasurer, make=make
    )
    device = DeviceLimits(using.about.multiprocessors, using.about.gpu, nvrtc())
    examined = [one.examined for one in families().values() if one.examined]
    here = {one: environment(device, one) for one in {p.operation.family for p in examined}}
    own = {name: version for name, version in worker.versions().items() if name in worker.OWN}
    versions = tuple((dict(using.about.versions) | own).items())
    about = replace(using.about, versions=versions)  # the first to join may be the one that differs
    fleet = using.fleet(examined, here, say, about=about, hanging=LIMIT + 100, confirms=False)
    return Cells(using, fleet, names, asked, cases)
