"""The run: kernels are compiled ahead while others are measured, until all is found or time is up.

Problems advance in turns, so that a budget that is too small leaves all of them with something
rather than some with all. Every result is in the journal before it is used; a problem's record is
saved as soon as its search ends.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, cast

from warploom.errors import WarploomError
from warploom.generator.artifact import Artifact
from warploom.generator.model import Constants
from warploom.generator.records import Environment, Record, Records
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.store import source_digest
from warploom.tuning.fleet.agreement import agreed, works
from warploom.tuning.fleet.members import Fleet, Member, Results
from warploom.tuning.gpu import Batch
from warploom.tuning.journal import Entry, Journal, Result
from warploom.tuning.judgement import Judgement
from warploom.tuning.problems import Problem
from warploom.tuning.search import Search
from warploom.tuning.searches import judged, searched

ROUNDS, FINAL_ROUNDS = 9, 31  # of single launches
BATCH_SECONDS = 3.0  # that a batch is expected to take, until one was measured
Status = Literal["tuned", "recorded before", "failed", "not reached"]


class Compiler(Protocol):
    """What builds kernels ahead of their measurement."""

    def submit(self, spec: KernelSpec) -> Future[Any]:
        """Return an Artifact, a CompilationError, or None where there is nothing to build."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How a run stands: problems done and in all, seconds of budget left, and what came last."""

    done: int
    total: int
    left: float
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How a problem ended. `record` is what is known of it now, `outcomes` how many had which."""

    problem: Problem
    status: Status
    record: Record | None
    outcomes: Mapping[str, int]
    reason: str = ""


@dataclass(eq=False)
class _Task:
    """A problem's search, and what it is at.

    builds   what its next batch waits for; batch: that, once it can be measured
    first    what one GPU found of the batch, while another is to confirm it
    member   the GPU that measures the problem
    """

    problem: Problem
    search: Search
    builds: dict[KernelSpec, Future[Any]] = field(default_factory=dict)
    batch: Batch | None = None
    first: Results | None = None
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
        self.ended: list[Ended] = []
        self._fleet, self._compiler, self._journal = fleet, compiler, journal
        self._environments, self._save = environments, save
        self._watch, self._alarm, self._clock = watch, alarm, clock
        self._deadline = clock() + budget
        self._batches: list[float] = []
        self._total = len(problems)
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
            if judge:
                if record is None:
                    reason = "there is no record to judge"
                    self.ended.append(Ended(problem, "failed", None, {}, reason))
                else:
                    self._add(problem, judged(record, here))
            elif record and not record.autotuned:
                self.ended.append(Ended(problem, "recorded before", record, {}))
            else:
                known = [] if again else journal.known(problem.operation, problem.shape, here)
                search = searched(problem, here, records, constants, known, exhaustive=exhaustive)
                self._add(problem, search)

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
                if not over:
                    self._hand_out()
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

    def _wake(self) -> None:
        self._events.put(None)

    def _begin(self, task: _Task) -> None:
        """Have what the search wants next built; or end it."""
        wanted = task.search.wanted(explore=self._explores())
        if not wanted:
            self._end(task)
            return
        task.first = None
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
        for future, (task, member, _) in [*self._measuring.items()]:
            if future.done() or member.gone:
                self._collect(task, member, self._measuring.pop(future)[2])

    def _explores(self) -> bool:
        """False when what is left of the budget is needed to bring all searches to their end."""
        usual = sum(self._batches) / len(self._batches) if self._batches else BATCH_SECONDS
        final = 2 if self._fleet.confirms and len(self._fleet) > 1 else 1
        batches = sum(final if search.results else 1 + final for search in self._open)
        needed = usual * batches / max(1, len(self._fleet))
        return self._clock() + needed < self._deadline

    def _hand_out(self) -> None:
        """Give what is ready to who is idle; a problem to the GPU that had it, if that is."""
        for member in self._fleet.idle():
            short = not self._explores()
            for task in [one for one in self._ready if short and one.could_end]:
                self._ready.remove(task)
                self._tasks.append(task)
            if chosen := self._next(member):
                self._ready.remove(chosen)
                chosen.member = chosen.member if chosen.first else member
                batch = cast("Batch", chosen.batch)
                future = self._fleet.submit(member, batch, self._wake)
                self._measuring[future] = (chosen, member, self._clock())
        for task in [one for one in self._ready if one.first and one.member]:
            if task.member and not self._fleet.has_other(task.member.name):
                self._ready.remove(task)
                self._settle(task)

    def _next(self, member: Member) -> _Task | None:
        """What an idle GPU measures next: of its own problems or of nobody's, else of another's.

        What one GPU has measured and another is to confirm comes first, since it ends a problem.
        """
        to_confirm = (one for one in self._ready if one.first and one.member is not member)
        own = (one for one in self._ready if not one.first and one.owner in (member, None))
        others = (one for one in self._ready if not one.first)
        return next(chain(to_confirm, own, others), None)

    def _batch(self, task: _Task) -> Batch | None:
        """What of a task's kernels was built; what was not is reported at once."""
        failed: dict[KernelSpec, Result] = {}
        for spec, build in task.builds.items():
            if reason := _unusable(build):
                failed[spec] = Result(spec.schedule, "compile error", reason=reason)
        specs = tuple(spec for spec in task.builds if spec not in failed)
        if failed:
            self._note(task.problem, failed)
            if task.search.stage != "final":
                task.search.report(failed)
        if not specs:
            if task.search.stage == "final":
                task.search.report(failed)
            return None
        rounds = FINAL_ROUNDS if task.search.stage == "final" else ROUNDS
        return Batch(task.problem.operation, task.problem.shape, specs, rounds)

    def _collect(self, task: _Task, member: Member, begun: float) -> None:
        """Take a batch's results, or have another GPU confirm them; where its GPU failed, neither.

        Another confirms what the finalists did, and that nothing of a batch works.
        """
        found = self._fleet.results(member, cast("Batch", task.batch))
        if found is None:
            self._ready.appendleft(task)
            return
        self._batches.append(self._clock() - begun)
        first, fleet = task.first, self._fleet
        final = task.search.stage == "final"
        if works(found):
            self._note(task.problem, found)
        if first is None or (works(found) and not works(first)):
            if first and task.member:
                fleet.contradicted(task.member, member)
            doubted = final or not works(found)
            task.first, task.member = found, member
            if doubted and fleet.confirms and fleet.has_other(member.name):
                self._ready.append(task)
            else:
                self._settle(task)
        elif task.member and works(first) and not works(found):
            fleet.contradicted(member, task.member)
            self._ready.append(task)
        else:
            self._settle(task, found)

    def _settle(self, task: _Task, second: Results | None = None) -> None:
        """Let a search have what one GPU found, or what two agree on."""
        found, task.first = task.first or {}, None
        if not works(found):
            self._note(task.problem, found)  # which is known for good only now
        task.search.report(agreed(found, second) if second else found)
        self._tell(task)
        self._tasks.append(task)

    # ---- Results ---------------------------------------------------------------------------------

    def _note(self, problem: Problem, results: Results) -> None:
        here, asked = (
            self._environments[problem.operation.family],
            (problem.operation, problem.shape),
        )
        self._journal.add(*(Entry(*asked, here, result) for result in results.values()))
        for spec, result in results.items():
            if result.outcome == "wrong":
                self._alarm(f"WRONG RESULT: {spec.name} at {problem}: {result.reason}")

    def _tell(self, task: _Task) -> None:
        best = task.search.best
        found = task.search.results[best] if best else None
        text = str(task.problem)
        if found and found.seconds:
            text += f": best so far {found.seconds * 1e6:.1f} us"
            if found.relative:
                text += f", {1 / found.relative:.3f} x default"
        left = max(0.0, self._deadline - self._clock())
        self._watch(Progress(len(self.ended), self._total, left, text))

    def _end(self, task: _Task) -> None:
        search, problem = task.search, task.problem
        self._open.remove(search)
        outcomes: Counter[str] = Counter(one.outcome for one in search.results.values())
        timed = search.timed() if search.stage == "done" or self._correct_twice(search) else None
        best = search.winner() if timed else None
        if timed is None or best is None:
            reached = bool(search.results)
            reason = _reasons(search) if reached and not outcomes["correct"] else ""
            status: Status = "failed" if reached and not outcomes["correct"] else "not reached"
            self.ended.append(Ended(problem, status, None, outcomes, reason))
            return
        if isinstance(search, Judgement) and best == search.present:
            self.ended.append(Ended(problem, "recorded before", search.record, outcomes))
            return
        noisy = any(result.noisy for result in search.contenders().values())
        record = Record(
            problem.operation,
            problem.shape,
            self._environments[problem.operation.family],
            *timed,
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            noisy=noisy,
            templates=source_digest(render(best))[:16],
        )
        self._save(record)
        self.ended.append(Ended(problem, "tuned", record, outcomes))
        self._tell(task)

    @staticmethod
    def _correct_twice(search: Search) -> bool:
        """Whether a search that was cut short knows the default and another in one loop."""
        return search.default in search.contenders() and len(search.contenders()) > 1


def _unusable(build: Future[Any]) -> str:
    """Why what was built is no candidate; empty where it is one."""
    try:
        built = build.result()
    except WarploomError as error:
        return str(error)
    if isinstance(built, WarploomError):
        return str(built)
    if not isinstance(built, Artifact):
        return ""
    if built.serialised:
        return f"wgmma is serialised: {built.serialised[0]}"
    if not all(entry.clean for entry in built.resources.values()):
        spilled = max(entry.spill_bytes for entry in built.resources.values())
        local = max(entry.local_bytes for entry in built.resources.values())
        return f"{spilled} bytes of spills, {local} of local memory"
    return ""


def _reasons(search: Search) -> str:
    counts = Counter(f"{one.outcome}: {one.reason}" for one in search.results.values())
    return "; ".join(f"{reason} ({count})" for reason, count in counts.most_common(2))
