"""The one tuner of a process: it is told of plans while somebody has it active."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from typing import Any

from warploom import hooks
from warploom.runtime import targets
from warploom.runtime.call import Draft
from warploom.runtime.decision import Choice
from warploom.runtime.plan import Plan
from warploom.tuning.autotune.activity import Activity
from warploom.tuning.autotune.course import Course
from warploom.tuning.autotune.problem import Planned, Tuned

ENDING = 5.0  # seconds that the end of the process waits for a record to be written


class Engine:
    """Begins and ends it, and hears of plans; `course` makes what tests put something in place of.

    Threads that call do two things: they tell of a plan, here, and they measure when a gate lets
    them. All else is the business of the thread that decides (course.py).
    """

    def __init__(self, course: Callable[[Activity], Course] = Course) -> None:
        self._activity, self._made_by = Activity(), course
        self.fresh()

    def fresh(self) -> None:
        """Know nothing, and have no thread: at the beginning, and in a forked child."""
        if hooks.observer is self:
            hooks.observer = None
        self._activity.fresh()
        self._course = self._made_by(self._activity)

    def enter(self, budget: float, jobs: int = 0) -> None:
        """Be told of plans, and give each new problem so many seconds of GPU time.

        `jobs` kernels are compiled at a time from now on; 0: as many as before.
        """
        with self._activity.lock:
            self._course.compile_with(jobs)
            self._activity.begin(budget, self._course.serve)
            hooks.observer = self
        self._course.resume()

    def leave(self, budget: float) -> None:
        """Take back one `enter`; after the last, calls run as they would without."""
        with self._activity.lock:
            if self._activity.end(budget):
                hooks.observer = None
                self._course.interrupt()

    def problems(self) -> list[Tuned]:
        """How the problems stand that were met."""
        return [
            one.told if one.told and one.state == "tuned" else Tuned(str(one), one.status)
            for one in self._course.problems()
        ]

    def finish(self, seconds: float = ENDING) -> None:
        """Wait, at most so long, until what was measured is recorded."""
        self._activity.finish(seconds)

    def planned(self, plan: Plan[Any, Any], draft: Draft[Any]) -> None:
        """Hear of a new plan: what has no record of its own is to be tuned."""
        asked = draft.choice.asked
        if plan.launch is None or asked is None or asked.recorded or self._activity.busy:
            return
        target = targets.at_hand(plan.device)
        planned = Planned(weakref.ref(plan), draft)
        budgets = self._activity.budgets[-1:] or [0.0]
        self._activity.tell(self._course.meet, target, asked, planned, budgets[-1])

    def told(self, choice: Choice) -> str:
        """How a choice's problem stands, for `explain`."""
        asked = choice.asked
        if asked is None or asked.recorded:
            return ""
        for problem in self._course.problems():
            if (problem.operation, problem.shape) == (asked.operation, asked.shape):
                return problem.status
        return "about to be compiled"


ENGINE = Engine()
os.register_at_fork(after_in_child=ENGINE.fresh)
atexit.register(ENGINE.finish)
