"""The one tuner of a process: it is told of plans while somebody has it active."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from typing import Any

from warploom import hooks
from warploom.generator.launches import NO_GPU
from warploom.runtime import targets
from warploom.runtime.dispatch import Choice
from warploom.runtime.plan import Plan, alive
from warploom.tuning.autotune.activity import Activity
from warploom.tuning.autotune.course import Course
from warploom.tuning.autotune.problem import UNHEARD, gate, shut
from warploom.tuning.autotune.report import Meetings, Report, Tuned

ENDING = 5.0  # seconds that the end of the process waits for a record to be written


class Engine:
    """Begins and ends it, and hears of plans; `course` makes what tests put something in place of.

    Threads that call do two things: they tell of a plan, here, and they measure when a gate lets
    them. All else is the business of the thread that decides (course.py).
    """

    def __init__(self, course: Callable[[Activity], Course] = Course) -> None:
        self._activity, self._made_by = Activity(), course
        self._course = course(self._activity)

    def fresh(self) -> None:
        """Know nothing, and have no thread: in a forked child."""
        if hooks.observer is self:
            hooks.observer = None
        self._activity.fresh()
        self._course.abandon()
        self._course = self._made_by(self._activity)

    def enter(self, context: Meetings, jobs: int = 0) -> None:
        """Be told of plans, and of the next call of each plan that there is.

        A context that was open before is not told again of what it met. `jobs` kernels are compiled
        at a time from now on; 0: as many as before.
        """
        with self._activity.lock:
            self._course.compile_with(jobs)
            self._activity.begin(context, self._course.serve)
            hooks.observer = self
        self._course.resume()
        with self._activity.lock:
            for plan in alive():  # those that are made meanwhile tell of themselves
                if self._activity.contexts and not context.has(plan):
                    gate(plan, self._meeting(plan), meets=True)

    def leave(self, context: Meetings) -> None:
        """Take back one `enter`; after the last, calls run as they would without."""
        with self._activity.lock:
            if self._activity.end(context):
                hooks.observer = hooks.Nobody()
                self._course.interrupt()
                for plan in alive():
                    shut(plan, meets=True)

    def stay_off(self) -> None:
        """Hear of no plans, unless another thread has begun to."""
        with self._activity.lock:
            if not self._activity.contexts:
                hooks.observer = hooks.Nobody()

    @property
    def busy(self) -> bool:
        """Whether the calls of this thread are measurements, none of the program's."""
        return self._activity.busy

    def problems(self, context: Meetings | None = None) -> list[Tuned]:
        """How the problems stand that are to be tuned: those of a context, or all."""
        with self._activity.lock:
            if context is not None:
                return context.tunable(self._course.standing)
            return [one.standing for one in self._course.problems()]

    def report(self, context: Meetings) -> Report:
        """How the problems stand that were met while a context was open."""
        with self._activity.lock:
            return context.report(self._course.standing)

    def finish(self, seconds: float = ENDING) -> None:
        """Wait, at most so long, until what was measured is recorded."""
        self._activity.finish(seconds)

    def planned(self, plan: Plan[Any, Any]) -> None:
        """Hear of a call of a plan: what has no record of its own is to be tuned."""
        if self._activity.busy:
            return
        target = NO_GPU if plan.launch is None else targets.at_hand(plan.device)
        if not self._activity.note(plan, target):
            return
        asked = plan.choice.asked
        if plan.launch is None or asked is None or asked.recorded:
            return
        with self._activity.lock:
            budgets = [one.budget for one in self._activity.contexts]
        if budgets:
            kept = weakref.ref(plan)  # what is told lives until the next is
            self._activity.tell(self._course.meet, target, asked, kept, budgets[-1])

    def _meeting(self, plan: Plan[Any, Any]) -> Callable[[], None]:
        """Tell of a plan's next call, once; a gate keeps no plan alive."""
        kept = weakref.ref(plan)

        def offer() -> None:
            if not self._activity.busy and (found := kept()) is not None:
                shut(found, meets=True)
                self.planned(found)

        return offer

    def told(self, choice: Choice) -> str:
        """How a choice's problem stands, for `explain`."""
        asked = choice.asked
        if asked is None or asked.recorded:
            return ""
        with self._activity.lock:
            for problem in self._course.problems():
                if (problem.operation, problem.shape) == (asked.operation, asked.shape):
                    return problem.status
        return UNHEARD


ENGINE = Engine()
os.register_at_fork(after_in_child=ENGINE.fresh)
atexit.register(ENGINE.finish)
