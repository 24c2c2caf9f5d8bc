"""The run: kernels are compiled ahead while others are measured, until all is found or time is up.

Problems advance in turns, so that a budget that is too small leaves all of them with something
rather than some with all. Every result is in the journal before it is used; a problem's record is
saved as soon as its search ends.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from warploom.errors import DeviceError, WarploomError
from warploom.generator.artifact import Artifact
from warploom.generator.launches import DeviceLimits
from warploom.generator.model import Constants, rank
from warploom.generator.records import Environment, Record, Records
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.store import source_digest
from warploom.tuning.gpu import Batch, Gpu
from warploom.tuning.journal import Entry, Journal, Result
from warploom.tuning.judgement import LIKELY, RUNNERS_UP, Judgement
from warploom.tuning.problems import Problem, default, fitting, likeliest
from warploom.tuning.search import Search

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


@dataclass
class _Task:
    problem: Problem
    search: Search
    builds: dict[KernelSpec, Future[Any]] = field(default_factory=dict)


class Tuner:
    """One run over `problems` on GPUs of one kind.

    save    takes a finished record; watch is told how the run stands; alarm of a wrong result
    judge   measures recorded problems, and no others: each record beside what the model chooses
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        gpus: Sequence[Gpu],
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
        self._gpus, self._compiler, self._journal = list(gpus), compiler, journal
        self._environments, self._save = environments, save
        self._watch, self._alarm, self._clock = watch, alarm, clock
        self._deadline = clock() + budget
        self._batches: list[float] = []
        self._total = len(problems)
        self._tasks: deque[_Task] = deque()
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
                    self._add(problem, self._judgement(record, here))
            elif record and not record.autotuned:
                self.ended.append(Ended(problem, "recorded before", record, {}))
            else:
                known = [] if again else journal.known(problem.operation, problem.shape, here)
                self._add(
                    problem, self._search(problem, here, records, constants, known, exhaustive)
                )

    def _add(self, problem: Problem, search: Search) -> None:
        self._tasks.append(_Task(problem, search))
        self._open.append(search)
        for spec in search.ahead:
            self._compiler.submit(spec)

    @staticmethod
    def _search(
        problem: Problem,
        here: Environment,
        records: Records,
        constants: Constants | None,
        known: Sequence[Result],
        exhaustive: bool,
    ) -> Search:
        operation, shape = problem.operation, problem.shape
        device = DeviceLimits(here.multiprocessors, here.gpu)
        ranked = rank(constants, problem.space, shape, here.multiprocessors)
        near = records.nearest(operation, shape, here)
        hints = [fitting(operation, shape, near.best.schedule, device.arch)] if near else []
        return Search(
            default(operation, shape, device),
            ranked,
            [spec for spec in hints if spec],
            known,
            exhaustive=exhaustive,
        )

    @staticmethod
    def _judgement(record: Record, here: Environment) -> Judgement:
        operation, shape = record.operation, record.shape
        device = DeviceLimits(here.multiprocessors, here.gpu)
        others = [fitting(operation, shape, one.schedule, device.arch) for one in record.runners_up]
        usual = likeliest(operation, shape, device, LIKELY)
        return Judgement(
            record,
            default(operation, shape, device),
            [*usual, *(spec for spec in others[:RUNNERS_UP] if spec)],
        )

    # ---- The loop --------------------------------------------------------------------------------

    def run(self) -> list[Ended]:
        """Tune every problem, or as many as the budget reaches; in the order of `problems`.

        On KeyboardInterrupt the measuring processes are ended; what is done is kept.
        """
        idle = deque(self._gpus)
        measuring: dict[Future[dict[KernelSpec, Result]], tuple[_Task, Gpu, float]] = {}
        building: list[_Task] = []
        ready: deque[tuple[_Task, Batch]] = deque()
        with ThreadPoolExecutor(max(1, len(self._gpus))) as threads:
            try:
                while self._tasks or building or ready or measuring:
                    while self._tasks:
                        self._begin(self._tasks.popleft(), building)
                    for task in [t for t in building if all(b.done() for b in t.builds.values())]:
                        building.remove(task)
                        if batch := self._batch(task):
                            ready.append((task, batch))
                        else:
                            self._tasks.append(task)
                    over = self._clock() >= self._deadline
                    if over and not measuring:
                        break
                    while idle and ready and not over:
                        task, batch = ready.popleft()
                        if self._has_had_its_time(task):
                            self._tasks.append(task)
                            continue
                        gpu = idle.popleft()
                        future = threads.submit(gpu.measure, batch)
                        measuring[future] = (task, gpu, self._clock())
                    builds = (b for t in building for b in t.builds.values() if not b.done())
                    if pending := [*measuring, *builds]:
                        wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                    for future in [one for one in measuring if one.done()]:
                        task, gpu, begun = measuring.pop(future)
                        if self._collect(task, gpu, future, begun):
                            idle.append(gpu)
                        self._tasks.append(task)
            finally:
                for gpu in self._gpus:
                    gpu.close()
        left = [*self._tasks, *building, *(task for task, _ in ready)]
        for task in left:
            self._end(task)
        return self.ended

    def _begin(self, task: _Task, building: list[_Task]) -> None:
        """Have what the search wants next built; or end it."""
        wanted = task.search.wanted(explore=self._explores())
        if not wanted:
            self._end(task)
            return
        task.builds = {spec: self._compiler.submit(spec) for spec in wanted}
        building.append(task)

    def _explores(self) -> bool:
        """False when what is left of the budget is needed to bring all searches to their end."""
        usual = sum(self._batches) / len(self._batches) if self._batches else BATCH_SECONDS
        batches = sum(1 if search.results else 2 for search in self._open)
        needed = usual * batches / max(1, len(self._gpus))
        return self._clock() + needed < self._deadline

    def _has_had_its_time(self, task: _Task) -> bool:
        """True of a task that wants to explore, and could end instead, where time is short."""
        search = task.search
        return search.stage != "final" and search.best is not None and not self._explores()

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

    def _collect(
        self, task: _Task, gpu: Gpu, future: Future[dict[KernelSpec, Result]], begun: float
    ) -> bool:
        """Take a batch's results; False where its GPU can no longer be used."""
        try:
            results = future.result()
        except DeviceError:
            self._gpus.remove(gpu)
            gpu.close()
            if not self._gpus:
                raise
            return False
        self._batches.append(self._clock() - begun)
        self._note(task.problem, results)
        task.search.report(results)
        self._tell(task)
        return True

    # ---- Results ---------------------------------------------------------------------------------

    def _note(self, problem: Problem, results: Mapping[KernelSpec, Result]) -> None:
        here = self._environments[problem.operation.family]
        for spec, result in results.items():
            self._journal.add(Entry(problem.operation, problem.shape, here, result))
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
