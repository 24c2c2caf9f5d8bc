"""What becomes of problems that were planned without a record: one thread of the process decides.

It reads and writes files and waits for compilers; calls do no more than offers.py lets them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import ref

from warploom.errors import RecordsError
from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec, Operation
from warploom.printable import first_line
from warploom.runtime import dispatch
from warploom.runtime import kernel as kernels
from warploom.runtime.dispatch import Asked
from warploom.runtime.plan import Plan
from warploom.tuning.autotune import locks, stage
from warploom.tuning.autotune.activity import Act, Activity
from warploom.tuning.autotune.contest import Measured
from warploom.tuning.autotune.helper import Helper, Reply
from warploom.tuning.autotune.keeping import Keeping
from warploom.tuning.autotune.offers import Offers
from warploom.tuning.autotune.outcome import fetched, record_of, tuned
from warploom.tuning.autotune.problem import UNHEARD, Key, Problem, gate, shut
from warploom.tuning.autotune.report import Met, Tuned
from warploom.tuning.problems import likeliest

POLL = 1.0  # seconds between two looks at what other processes have recorded
LIKELY = 8  # of the table's kernels: see candidates.py

logger = logging.getLogger(__name__)


class Course:
    """The problems of a process; arguments after the first are what tests replace."""

    def __init__(
        self,
        activity: Activity,
        measure: Callable[..., Measured] = stage.measure,
        may_measure: Callable[[int], bool] = stage.may_measure,
        rehearse: Callable[[Operation, int], None] = stage.rehearse,
        helper: Callable[[Callable[[Reply], None]], Helper] = Helper,
        poll: float = POLL,
    ) -> None:
        self._activity, self._poll = activity, poll
        self._rehearse = rehearse
        self._offers = Offers(activity, measure, may_measure, self._take)
        self._problems: dict[Key, Problem] = {}
        self._requests: dict[int, Problem] = {}
        self._keeping = Keeping()
        self._helper = helper(lambda reply: activity.tell(self._hear, reply))
        self._rehearsed: set[tuple[Operation, int]] = set()

    def problems(self) -> list[Problem]:
        """Those that were met, in order."""
        return list(self._problems.values())

    def standing(self, met: Met) -> Tuned:
        """How a problem stands that is to be tuned."""
        asked = met.asked
        found = self._problems.get((met.target, asked.operation, asked.shape)) if asked else None
        return found.standing if found else Tuned(str(met), UNHEARD)

    def resume(self) -> None:
        """Go on with what nobody had active for a while."""
        for problem in self.problems():
            if problem.state == "ready" or problem.interrupted:
                self._resume(problem)

    def compile_with(self, jobs: int) -> None:
        """Compile so many kernels at a time; 0: as many as before."""
        self._helper.jobs = jobs or self._helper.jobs

    def interrupt(self) -> None:
        """Take the gates away: nobody has it active; under the lock."""
        for problem in self.problems():
            problem.interrupted |= problem.close()

    def abandon(self) -> None:
        """Keep no file of the process that this one was forked from."""
        for problem in self.problems():
            if problem.lock is not None:
                problem.lock.abandon()

    # ---- The thread that decides -----------------------------------------------------------------

    def serve(self, queue: SimpleQueue[Act]) -> None:
        """Do what is told, one after the other, and look now and then at what others recorded."""
        looked = time.monotonic()
        while True:
            waiting = [one for one in self._problems.values() if one.state == "elsewhere"]
            with suppress(Empty):
                act = queue.get(timeout=self._poll if waiting else None)
                self._safely(act)
            if waiting and time.monotonic() - looked >= self._poll:
                looked = time.monotonic()
                for problem in waiting:
                    self._safely(partial(self._begin, problem))

    @staticmethod
    def _safely(act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            logger.exception("autotune: a problem is not tuned")

    @contextmanager
    def _or_failed(self, problem: Problem) -> Iterator[None]:
        """Inside, an error ends the problem: nobody waits for it, and other processes may tune it.

        It would keep its lock, and its state, for as long as the process runs.
        """
        try:
            yield
        except Exception as error:
            self._fail(problem, first_line(error))
            raise

    def meet(
        self, target: DeviceLimits, asked: Asked, kept: ref[Plan[Any, Any]], budget: float
    ) -> None:
        """Take a plan to its problem, which has `budget` seconds of GPU time if it is new.

        One that could not be tuned within less is new again.
        """
        key = (target, asked.operation, asked.shape)
        problem = self._problems.get(key)
        if problem is None:
            problem = Problem(*key, began=time.monotonic(), budget=budget)
            self._problems[key] = problem
        problem.add(kept)
        if problem.state == "failed" and budget > problem.budget:
            with self._activity.lock:
                problem.state, problem.reason, problem.budget = "new", "", budget
        match problem.state:
            case "new":
                self._begin(problem)
            case "compiling":
                self._prepare(problem)
            case "ready" | "tuned":
                self._resume(problem)

    def _resume(self, problem: Problem) -> None:
        """Put the gates of a problem where they belong."""
        problem.interrupted = False
        if problem.state == "ready":
            with self._activity.lock:
                self._open(problem)
        elif problem.state == "tuned":
            self._renew(problem, ask=False)

    def _open(self, problem: Problem) -> None:
        """Offer the next call of each plan to measure the problem; under the lock."""
        if self._activity.contexts:
            problem.open(lambda plan: self._offers.to_measure(problem, plan))

    def _begin(self, problem: Problem) -> None:
        """Take a record that there is, or have the candidates compiled if no other process does."""
        with self._or_failed(problem):
            if not self._recorded(problem) and self._locked(problem):
                self._ask(problem)
                self._prepare(problem)

    def _locked(self, problem: Problem) -> bool:
        """Whether this process has the right to tune a problem, which has no record."""
        try:
            problem.lock = locks.take(problem.target.gpu, problem.operation, problem.shape)
        except OSError as error:
            self._fail(problem, self._keeping.unwritable(error))
            return False
        if problem.lock is None:
            problem.state = "elsewhere"
            return False
        return not self._recorded(problem)  # by a process that had the lock until now

    def _ask(self, problem: Problem) -> None:
        """Have the candidates of a problem compiled."""
        operation, shape, target = problem.operation, problem.shape, problem.target
        requires = family(operation.family).table.required(operation, shape)
        chosen = dispatch.choose(operation, shape, device=target, requires=requires)
        problem.present = chosen.spec
        problem.default = dispatch.untuned(operation, shape, target, requires).spec
        likely = likeliest(operation, shape, target, LIKELY)
        first = list(dict.fromkeys([problem.present, problem.default, *likely]))
        self._requests[self._helper.find(operation, shape, target, first)] = problem
        problem.state = "compiling"

    def _prepare(self, problem: Problem) -> None:
        """Rehearse while candidates are compiled, so that no call has to wait for it."""
        wanted = {(problem.operation, plan.device) for plan in problem.plans()}
        for one in wanted - self._rehearsed:
            self._rehearsed.add(one)
            self._activity.owe(1)
            try:
                self._rehearse(*one)
            except Exception as error:
                logger.info("autotune: the first call that measures may take longer: %s", error)
            finally:
                self._activity.owe(-1)

    def _recorded(self, problem: Problem) -> bool:
        """Whether there is a record now, which then decides."""
        if not self._keeping.recorded(problem):
            return False
        self._release(problem)
        self._renew(problem)
        return True

    def _hear(self, reply: Reply) -> None:
        """Take an answer of the process that compiles."""
        problem = self._requests.get(reply["number"])
        if problem is None:
            return
        if "compiling" in reply:
            problem.compiling = reply["compiling"]
            return
        del self._requests[reply["number"]]
        self._helper.done(reply["number"])
        with self._or_failed(problem):
            self._answered(problem, reply)

    def _answered(self, problem: Problem, reply: Reply) -> None:
        """Take what was built of a problem's kernels."""
        if problem.state == "recorded":
            fetched(reply.get("built", ()))
            self._renew(problem, ask=False)
        elif "failed" in reply:
            self._fail(problem, reply["failed"])
        else:
            problem.candidates = tuple(fetched(reply["built"]))
            if problem.present not in problem.candidates or len(problem.candidates) < 2:
                self._fail(problem, "there is nothing to compare its kernel with")
                return
            with self._activity.lock:  # whoever reads that it is ready finds the gates open
                problem.state, problem.interrupted = "ready", False
                self._open(problem)

    def _take(self, problem: Problem, outcome: Measured | str, stall: float) -> None:
        """Record what was measured, and have plans run it."""
        try:
            with self._or_failed(problem):
                self._record(problem, outcome, stall)
        finally:
            self._activity.owe(-1)

    def _record(self, problem: Problem, outcome: Measured | str, stall: float) -> None:
        if isinstance(outcome, str):
            self._fail(problem, outcome)
            return
        for spec, reason in outcome.failed.items():
            level = logging.WARNING if reason.startswith("WRONG") else logging.INFO
            logger.log(level, "autotune: %s at %s: %s", spec.name, problem, reason)
        record = record_of(problem, outcome)
        try:
            self._keeping.keep(problem.target.gpu, record)
        except RecordsError as error:
            self._fail(problem, self._keeping.unwritable(error))
            return
        problem.told = tuned(problem, outcome, time.monotonic() - problem.began)
        logger.info(
            "autotuned %s: %s, %.1f ms of GPU time, the call took %.0f ms",
            *(problem, outcome.winner.name, outcome.spent * 1e3, stall * 1e3),
        )
        self._release(problem)
        self._renew(problem)

    def _renew(self, problem: Problem, *, ask: bool = True) -> None:
        """Let plans run what the record says, from a next call on; what is missing is built."""
        missing: list[KernelSpec] = []
        with self._activity.lock:
            for plan in problem.plans():
                asked = plan.draft.choice.asked
                if asked is None:
                    continue
                choice = dispatch.choose(
                    asked.operation, asked.shape, device=problem.target, requires=asked.requires
                )
                if choice.spec == plan.choice.spec:
                    shut(plan, choice)
                elif choice.spec not in kernels._kernels:
                    missing.append(choice.spec)
                elif not self._activity.contexts:
                    problem.interrupted = True
                else:
                    shut(plan)
                    gate(plan, self._offers.to_swap(problem, plan, choice))
            built = not missing or not ask
            problem.state = "tuned" if built else "recorded"
        if not built:
            self._requests[self._helper.build(list(dict.fromkeys(missing)))] = problem

    def _fail(self, problem: Problem, reason: str) -> None:
        self._release(problem)
        with self._activity.lock:
            problem.close()
            problem.state, problem.reason = "failed", reason
        logger.info("autotune: %s: %s", problem, problem.status)

    @staticmethod
    def _release(problem: Problem) -> None:
        lock, problem.lock = problem.lock, None  # first: a child may be forked at any time
        if lock is not None:
            lock.release()
