"""What becomes of problems that were planned without a record: one thread of the process decides.

Threads that call do two things here: they tell of a plan, and they measure when a gate lets them.
All else, such as reading and writing files and waiting for compilers, is the engine's thread's.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from warploom import hooks
from warploom.errors import RecordsError, WarploomError
from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.locks import ForkLock
from warploom.generator.specification import KernelSpec, Operation
from warploom.runtime import dispatch, targets
from warploom.runtime import kernel as kernels
from warploom.runtime.call import Draft
from warploom.runtime.decision import Asked, Choice
from warploom.runtime.launch_plan import plan_launches
from warploom.runtime.plan import Plan
from warploom.tuning.autotune import locks, stage
from warploom.tuning.autotune.contest import Measured, NotMeasured
from warploom.tuning.autotune.helper import Helper, Reply
from warploom.tuning.autotune.keeping import Keeping
from warploom.tuning.autotune.outcome import fetched, record_of, tuned
from warploom.tuning.autotune.problem import Key, Planned, Problem, Tuned, gate, shut

POLL = 1.0  # seconds between two looks at what other processes have recorded
ENDING = 5.0  # seconds that the end of the process waits for a record to be written

logger = logging.getLogger(__name__)


class Engine:
    """The one tuner of a process; the arguments are what tests put others in place of."""

    def __init__(
        self,
        measure: Callable[..., Measured] = stage.measure,
        may_measure: Callable[[int], bool] = stage.may_measure,
        rehearse: Callable[[Operation, int], None] = stage.rehearse,
        helper: Callable[[Callable[[Reply], None]], Helper] = Helper,
        poll: float = POLL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure, self._may_measure, self._made_by = measure, may_measure, helper
        self._rehearse = rehearse
        self._poll, self._clock = poll, clock
        self._lock = ForkLock()
        self.fresh()

    def fresh(self) -> None:
        """Know nothing, and have no thread: at the beginning, and in a forked child."""
        if hooks.observer is self:
            hooks.observer = None
        self._budgets: list[float] = []  # of those who have it active, in seconds
        self._problems: dict[Key, Problem] = {}
        self._requests: dict[int, Problem] = {}
        self._keeping = Keeping()
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._helper = self._made_by(lambda reply: self._tell(self._hear, reply))
        self._own = threading.local()
        self._rehearsed: set[tuple[Operation, int]] = set()
        self._unwritten = 0  # records, and what else the end of the process waits for

    # ---- Who has it active -----------------------------------------------------------------------

    def enter(self, budget: float) -> None:
        """Be told of plans, and give each new problem so many seconds of GPU time."""
        with self._lock:
            self._budgets.append(budget)
            hooks.observer = self
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, args=(self._queue,), name="warploom.autotune", daemon=True
                )
                self._thread.start()
        for problem in list(self._problems.values()):
            if problem.state == "ready" or problem.interrupted:
                self._resume(problem)

    def leave(self, budget: float) -> None:
        """Take back one `enter`; after the last, calls run as they would without."""
        with self._lock:
            if budget in self._budgets:
                self._budgets.remove(budget)
            if self._budgets:
                return
            hooks.observer = None
            for problem in list(self._problems.values()):
                problem.interrupted |= problem.close()

    def problems(self) -> list[Tuned]:
        """How the problems stand that were met."""
        found = list(self._problems.values())
        return [
            one.told if one.told and one.state == "tuned" else Tuned(str(one), one.status)
            for one in found
        ]

    def finish(self, seconds: float = ENDING) -> None:
        """Wait, at most so long, until what was measured is recorded."""
        until = self._clock() + seconds
        while self._unwritten and self._clock() < until:
            time.sleep(0.01)

    # ---- Threads that call -----------------------------------------------------------------------

    def planned(self, plan: Plan[Any, Any], draft: Draft[Any]) -> None:
        """Hear of a new plan: what has no record of its own is to be tuned."""
        asked = draft.choice.asked
        if plan.launch is None or asked is None or asked.recorded or self._busy:
            return
        target = targets.at_hand(plan.device)
        planned = Planned(weakref.ref(plan), draft)
        self._tell(self._meet, target, asked, planned, self._budgets[-1:] or [0.0])

    def told(self, choice: Choice) -> str:
        """How a choice's problem stands, for `explain`."""
        asked = choice.asked
        if asked is None or asked.recorded:
            return ""
        for (_, operation, shape), problem in list(self._problems.items()):
            if (operation, shape) == (asked.operation, asked.shape):
                return problem.status
        return "about to be compiled"

    @property
    def _busy(self) -> bool:
        """Whether this thread is measuring: its calls are the engine's own."""
        return getattr(self._own, "busy", False)

    def _try(self, problem: Problem, plan: Plan[Any, Any]) -> None:
        """Measure a problem, if this call may wait for it and no other one does."""
        if self._busy or not self._budgets or not self._may_measure(plan.device):
            return
        with self._lock:
            if problem.state != "ready" or problem.present is None:
                return
            problem.state = "measuring"
            self._unwritten += 1
        problem.close()
        self._own.busy, began = True, self._clock()
        outcome: Measured | str
        try:
            kept = (problem.default,) if problem.default in problem.candidates else ()
            outcome = self._measure(
                problem.operation,
                problem.shape,
                plan.device,
                problem.present,
                kept,
                problem.candidates,
                problem.budget,
            )
        except NotMeasured as error:
            outcome = str(error)
        except Exception as error:
            outcome = (str(error) or type(error).__name__).splitlines()[0]
            logger.warning("autotune: %s: %s", problem, outcome)
        finally:
            self._own.busy = False
        self._tell(self._take, problem, outcome, self._clock() - began)

    def _swap(self, plan: Plan[Any, Any], planned: Planned, choice: Choice) -> None:
        """Give a plan the launches of another kernel, if they may be laid out now."""
        if self._busy or not self._budgets or not self._may_measure(plan.device):
            return
        draft = planned.draft
        try:
            launch = plan_launches(
                choice.spec, draft.problem, plan.device, draft.tensors, draft.scalars
            )
        except WarploomError as error:
            logger.warning("autotune: %s stays: %s", plan.choice.spec.name, error)
            shut(plan)
            return
        plan.relaunch(choice, launch)

    # ---- The engine's thread ---------------------------------------------------------------------

    def _tell(self, act: Callable[..., None], *given: Any) -> None:
        self._queue.put(partial(act, *given))

    def _serve(self, queue: SimpleQueue[Callable[[], None]]) -> None:
        """Do what is told, one after the other, and look now and then at what others recorded."""
        looked = self._clock()
        while True:
            waiting = [one for one in self._problems.values() if one.state == "elsewhere"]
            with suppress(Empty):
                act = queue.get(timeout=self._poll if waiting else None)
                self._safely(act)
            if waiting and self._clock() - looked >= self._poll:
                looked = self._clock()
                for problem in waiting:
                    self._safely(partial(self._begin, problem))

    @staticmethod
    def _safely(act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            logger.exception("autotune: a problem is left as it is")

    def _meet(
        self, target: DeviceLimits, asked: Asked, planned: Planned, budgets: Sequence[float]
    ) -> None:
        key = (target, asked.operation, asked.shape)
        problem = self._problems.get(key)
        if problem is None:
            problem = Problem(*key, began=self._clock(), budget=budgets[-1])
            self._problems[key] = problem
        problem.add(planned)
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
            with self._lock:
                if self._budgets:
                    problem.open(lambda plan, _: self._trying(problem, weakref.ref(plan)))
        elif problem.state == "tuned":
            self._renew(problem, ask=False)

    def _trying(self, problem: Problem, plan: weakref.ref[Plan[Any, Any]]) -> Callable[[], None]:
        def offer() -> None:
            if (found := plan()) is not None:
                self._try(problem, found)

        return offer

    def _begin(self, problem: Problem) -> None:
        """Take a record that there is, or have the candidates compiled if no other process does."""
        operation, shape, target = problem.operation, problem.shape, problem.target
        if self._recorded(problem):
            return
        try:
            problem.lock = locks.take(target.gpu, operation, shape)
        except OSError as error:
            self._fail(problem, self._keeping.unwritable(error))
            return
        if problem.lock is None:
            problem.state = "elsewhere"
            return
        if self._recorded(problem):
            return
        requires = family(operation.family).table.required(operation, shape)
        chosen = dispatch.choose(operation, shape, device=target, requires=requires)
        problem.present = chosen.spec
        problem.default = dispatch.untuned(operation, shape, target, requires).spec
        problem.state = "compiling"
        first = list(dict.fromkeys([problem.present, problem.default]))
        self._requests[self._helper.find(operation, shape, target, first)] = problem
        self._prepare(problem)

    def _prepare(self, problem: Problem) -> None:
        """Rehearse while candidates are compiled, so that no call has to wait for it."""
        wanted = {(problem.operation, plan.device) for plan, _ in problem.plans()}
        for one in wanted - self._rehearsed:
            self._rehearsed.add(one)
            self._count(1)
            try:
                self._rehearse(*one)
            except Exception as error:
                logger.info("autotune: the first call that measures may take longer: %s", error)
            finally:
                self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._unwritten += more

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
            problem.state = "ready"
            self._resume(problem)

    def _take(self, problem: Problem, outcome: Measured | str, stall: float) -> None:
        """Record what was measured, and have plans run it."""
        try:
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
            told = tuned(problem, outcome, self._clock() - problem.began)
            logger.info(
                "autotuned %s: %s, %.1f ms of GPU time, the call took %.0f ms",
                *(problem, outcome.winner.name, outcome.spent * 1e3, stall * 1e3),
            )
            self._release(problem)
            self._renew(problem)
            problem.told = told
        finally:
            self._count(-1)

    def _renew(self, problem: Problem, *, ask: bool = True) -> None:
        """Let plans run what the record says, from a next call on; what is missing is built."""
        missing: list[KernelSpec] = []
        with self._lock:
            for plan, planned in problem.plans():
                asked = planned.draft.choice.asked
                if asked is None:
                    continue
                choice = dispatch.choose(
                    asked.operation, asked.shape, device=problem.target, requires=asked.requires
                )
                if choice.spec == plan.choice.spec:
                    shut(plan, choice)
                elif choice.spec not in kernels._kernels:
                    missing.append(choice.spec)
                elif not self._budgets:
                    problem.interrupted = True
                else:
                    shut(plan)
                    gate(plan, self._swapping(planned, choice))
        if missing and ask:
            problem.state = "recorded"
            self._requests[self._helper.build(list(dict.fromkeys(missing)))] = problem
        else:
            problem.state = "tuned"

    def _swapping(self, planned: Planned, choice: Choice) -> Callable[[], None]:
        def offer() -> None:
            if (plan := planned.plan()) is not None:
                self._swap(plan, planned, choice)

        return offer

    def _fail(self, problem: Problem, reason: str) -> None:
        problem.state, problem.reason = "failed", reason
        problem.close()
        self._release(problem)
        logger.info("autotune: %s: %s", problem, problem.status)

    @staticmethod
    def _release(problem: Problem) -> None:
        if problem.lock is not None:
            problem.lock.release()
            problem.lock = None


ENGINE = Engine()
os.register_at_fork(after_in_child=ENGINE.fresh)
atexit.register(ENGINE.finish)
