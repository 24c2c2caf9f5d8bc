"""The run: kernels are compiled ahead while others are measured, until all is found or time is up.

Problems advance in turns, so that a budget that is too small leaves all of them with something
rather than some with all. What comes of them is kept and told as account.py says.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, cast

from warploom.generator.model import Constants
from warploom.generator.records import Environment, Record, Records
from warploom.generator.specification import KernelSpec
from warploom.tuning.account import Account, Ended, Progress
from warploom.tuning.builds import Compiler, lasting, unusable
from warploom.tuning.fleet.agreement import agreed, unconfirmed, works
from warploom.tuning.fleet.members import Fleet, Member, Results
from warploom.tuning.gpu import Batch
from warploom.tuning.journal import Journal, Result
from warploom.tuning.problems import Problem, runnable
from warploom.tuning.search import Search
from warploom.tuning.searches import judged, searched

PRECISION, FINAL_PRECISION = 0.015, 0.006  # standard errors of times
SETS, FINAL_SETS = 8, 16  # of buffers
BATCH_SECONDS = 3.0  # that a batch is expected to take, until one was measured


@dataclass(eq=False)
class _Task:
    """A problem's search, and what it is at.

    builds   what its next batch waits for; batch: that, once it can be measured
    first    what one GPU found of the batch, while another is to confirm it
    second   what others found of it since
    member   the GPU that measures the problem
    """

    problem: Problem
    search: Search
    builds: dict[KernelSpec, Future[Any]] = field(default_factory=dict)
    batch: Batch | None = None
    first: Results | None = None
    second: Results = field(default_factory=dict)
    member: Member | None = None

    @property
    def owner(self) -> Member | None:
        """The GPU that measures the problem, while it is there."""
        return None if self.member is None or self.member.gone else self.member

    @property
    def could_end(self) -> bool:
        """True of one that wants to explore, and could end instead, where time is short."""
        search = self.search
        return self.first is None and search.stage != "final" and search.best is not None


class Tuner:
    """One run over `problems` on the GPUs of a fleet, which are of one kind.

    save    takes a finished record; watch is told how the run stands; alarm of a wrong result
    judge   measures recorded problems, and no others: each record beside what the model chooses
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        fleet: Fleet,
        compiler: Compiler,
        journal: Journal,
        records: Records,
        environments: Mapping[str, Environment],
        *,
        budget: float,
        constants: Constants | None = None,
        save: Callable[[Record], object],
        watch: Callable[[Progress], None] = lambda progress: None,
        alarm: Callable[[str], None] = lambda text: None,
        again: bool = False,
        exhaustive: bool = False,
        judge: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._compiler, self._clock = fleet, compiler, clock
        self._deadline = clock() + budget
        self._account = Account(
            *(journal, environments, len(problems)),
            left=lambda: self._deadline - clock(),
            save=save,
            watch=watch,
            alarm=alarm,
        )
        self._batches: list[float] = []
        self._tasks: deque[_Task] = deque()  # whose search says what is next
        self._building: list[_Task] = []
        self._ready: deque[_Task] = deque()
        self._measuring: dict[Future[Results], tuple[_Task, Member, float]] = {}
        self._events: SimpleQueue[_Task | None] = SimpleQueue()
        self._open: list[Search] = []  # of problems that have not ended
        for problem in problems:
            here = environments[problem.operation.family]
            fresh = again and not judge
            record = None if fresh else records.exact(problem.operation, problem.shape, here)
            if record and not runnable(record, here):  # calls pass it over, too
                record = None
            if judge:
                if record is None:
                    self._account.without(problem, "there is no record of a legal kernel to judge")
                else:
                    self._add(problem, judged(record, here))
            elif record and not record.autotuned:
                self._account.known(problem, record)
            else:
                known = [] if again else journal.known(problem.operation, problem.shape, here)
                search = searched(problem, here, records, constants, known, exhaustive=exhaustive)
                self._add(problem, search)

    @property
    def ended(self) -> list[Ended]:
        """How problems ended, as far as they have."""
        return self._account.ended

    def _add(self, problem: Problem, search: Search) -> None:
        self._tasks.append(_Task(problem, search))
        self._open.append(search)
        for spec in search.ahead:
            self._compiler.submit(spec)

    # ---- The loop --------------------------------------------------------------------------------

    def run(self) -> list[Ended]:
        """Tune every problem, or as many as the budget reaches; in the order of `problems`.

        On KeyboardInterrupt the measuring processes are ended; what is done is kept.
        """
        try:
            while self._tasks or self._building or self._ready or self._measuring:
                while self._tasks:
                    self._begin(self._tasks.popleft())
                over = self._clock() >= self._deadline
                if over and not self._measuring:
                    break
                self._fleet.refresh(self._wake)
                self._hand_out()
                self._send_ahead()
                if not self._tasks and (self._building or self._ready or self._measuring):
                    self._listen()
        finally:
            self._fleet.close()
        for task in [one for one in self._ready if one.first]:  # nobody confirmed it in time
            self._ready.remove(task)
            self._settle(task)
        for task in [*self._tasks, *self._building, *self._ready]:
            self._end(task)
        return self.ended

    def _end(self, task: _Task) -> None:
        self._open.remove(task.search)
        self._account.end(task.problem, task.search)

    def _wake(self) -> None:
        self._events.put(None)

    def _begin(self, task: _Task) -> None:
        """Have what the search wants next built; or end it."""
        wanted = task.search.wanted(explore=self._explores())
        if not wanted:
            self._end(task)
            return
        task.first, task.second = None, {}
        task.builds = {spec: self._compiler.submit(spec) for spec in wanted}
        self._building.append(task)
        for build in task.builds.values():
            build.add_done_callback(lambda _: self._events.put(task))

    def _listen(self) -> None:
        """Wait for something to end, a second at most, and take all that has."""
        told: list[_Task | None] = []
        with suppress(Empty):
            told.append(self._events.get(timeout=1.0))
            while True:
                told.append(self._events.get_nowait())
        for task in dict.fromkeys(told):
            if task and task in self._building and all(b.done() for b in task.builds.values()):
                self._building.remove(task)
                task.batch = self._batch(task)
                (self._ready if task.batch else self._tasks).append(task)
        self._collect()

    def _explores(self) -> bool:
        """False when what is left of the budget is needed to bring all searches to their end."""
        usual = sum(self._batches) / len(self._batches) if self._batches else BATCH_SECONDS
        final = 2 if self._fleet.confirms and len(self._fleet) > 1 else 1
        batches = sum(final if search.results else 1 + final for search in self._open)
        needed = usual * batches / max(1, len(self._fleet))
        return self._clock() + needed < self._deadline

    def _hand_out(self) -> None:
        """Give what is ready to who is idle; a problem to the GPU that had it, if that is."""
        for member in self._fleet.idle() if self._clock() < self._deadline else ():
            short = not self._explores()
            for task in [one for one in self._ready if short and one.could_end]:
                self._ready.remove(task)
                self._tasks.append(task)
            if chosen := self._next(member):
                self._ready.remove(chosen)
                chosen.member = chosen.member if chosen.first else member
                batch = cast("Batch", chosen.batch)
                begun = self._clock()  # of what is handed out, another thread may be done at once
                future = self._fleet.submit(member, batch, self._wake)
                self._measuring[future] = (chosen, member, begun)
        for task in [one for one in self._ready if one.first and one.member]:
            if task.member and not self._fleet.has_other(task.member.name):
                self._ready.remove(task)
                self._settle(task)

    def _send_ahead(self) -> None:
        """Have the kernels on their way that those who measure will measure next."""
        given: list[_Task] = []
        for member in self._fleet.busy():
            if len(given) < len(self._ready) and (chosen := self._next(member, given)):
                given.append(chosen)
                self._fleet.prepare(member, cast("Batch", chosen.batch))

    def _next(self, member: Member, but: Sequence[_Task] = ()) -> _Task | None:
        """What an idle GPU measures next: of its own problems or of nobody's, else of another's.

        What one GPU has measured and another is to confirm comes first, since it ends a problem.
        """
        ready = [one for one in self._ready if one not in but]
        to_confirm = (one for one in ready if one.first and one.member is not member)
        own = (one for one in ready if not one.first and one.owner in (member, None))
        others = (one for one in ready if not one.first)
        return next(chain(to_confirm, own, others), None)

    def _batch(self, task: _Task) -> Batch | None:
        """What of a task's kernels was built; what was not is reported at once.

        The journal has it only if it says something of the kernel: the next run tries the others.
        """
        failed: dict[KernelSpec, Result] = {}
        for spec, build in task.builds.items():
            if reason := unusable(build):
                failed[spec] = Result(spec.schedule, "compile error", reason=reason)
        specs = tuple(spec for spec in task.builds if spec not in failed)
        if failed:
            known = {spec: one for spec, one in failed.items() if lasting(task.builds[spec])}
            self._account.note(task.problem, known)
            if task.search.stage != "final":
                task.search.report(failed)
        if not specs:
            if task.search.stage == "final":
                task.search.report(failed)
            return None
        final = task.search.stage == "final"
        precision, sets = (FINAL_PRECISION, FINAL_SETS) if final else (PRECISION, SETS)
        return Batch(task.problem.operation, task.problem.shape, specs, precision, sets)

    def _collect(self) -> None:
        """Take what was measured; what a GPU failed at is work again.

        GPUs have their next batch before anybody looks at the last one.
        """
        ended: list[tuple[_Task, Member, Results]] = []
        for future, (task, member, begun) in [*self._measuring.items()]:
            if future.done() or member.gone:
                del self._measuring[future]
                found = self._fleet.results(member, cast("Batch", task.batch))
                if found is None:
                    self._ready.appendleft(task)
                else:
                    self._batches.append(self._clock() - begun)
                    ended.append((task, member, found))
        if ended:
            self._hand_out()
        for one in ended:
            self._take(*one)

    def _take(self, task: _Task, member: Member, found: Results) -> None:
        """Take a batch's results, and have another GPU confirm what it must."""
        fleet = self._fleet
        if works(found):
            self._account.note(task.problem, found)
        if task.first is None or (works(found) and not works(task.first)):
            if task.first and task.member:
                fleet.contradicted(task.member, member)
            task.first, task.member = found, member
        elif task.member and works(task.first) and not works(found):
            fleet.contradicted(member, task.member)
            self._ready.append(task)
            return
        else:
            task.second = {**task.second, **found}
        asked = unconfirmed(task.search, task.first, task.second)
        others = task.member is not None and fleet.has_other(task.member.name)
        if asked and task.batch and fleet.confirms and others:
            task.batch = replace(task.batch, specs=asked)
            self._ready.append(task)
        else:
            self._settle(task)

    def _settle(self, task: _Task) -> None:
        """Let a search have what one GPU found, as far as another did not find otherwise."""
        found = agreed(task.first or {}, task.second)
        task.first, task.second = None, {}
        if not works(found):
            self._account.note(task.problem, found)  # which is known for good only now
        task.search.report(found)
        self._account.tell(task.problem, task.search)
        self._tasks.append(task)
