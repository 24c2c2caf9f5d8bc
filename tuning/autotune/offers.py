"""What a call is offered before its launches: to measure its problem, or to run another kernel."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

from warploom.errors import WarploomError
from warploom.printable import first_line
from warploom.runtime.dispatch import Choice
from warploom.runtime.launch_plan import plan_launches
from warploom.runtime.plan import Plan
from warploom.tuning.autotune.activity import Activity
from warploom.tuning.autotune.contest import Measured, NotMeasured
from warploom.tuning.autotune.problem import Problem, shut, swap

Take = Callable[[Problem, Measured | str, float], None]

logger = logging.getLogger(__name__)


class Offers:
    """What gates let a thread that calls do.

    measure      finds the fastest of a problem's kernels (stage.measure)
    may_measure  whether this thread's call on a GPU may wait for it
    take         what the thread that decides does with what was measured, and how long it took
    """

    def __init__(
        self,
        activity: Activity,
        measure: Callable[..., Measured],
        may_measure: Callable[[int], bool],
        take: Take,
    ) -> None:
        self._activity, self._take = activity, take
        self._measure, self._may_measure = measure, may_measure

    def to_measure(self, problem: Problem, plan: Plan[Any, Any]) -> Callable[[], None]:
        """Offer to measure a problem; a gate keeps no plan alive."""
        kept = weakref.ref(plan)

        def offer() -> None:
            if (found := kept()) is not None and self._may(problem, found):
                self._try(problem, found)

        return offer

    def to_swap(self, problem: Problem, plan: Plan[Any, Any], choice: Choice) -> Callable[[], None]:
        """Offer to run another kernel from now on; a gate keeps no plan alive."""
        kept = weakref.ref(plan)

        def offer() -> None:
            if (found := kept()) is not None and self._may(problem, found):
                self._swap(found, choice, offer)

        return offer

    def _may(self, problem: Problem, plan: Plan[Any, Any]) -> bool:
        """Whether this call may wait: it is the program's own, and under no capture."""
        activity = self._activity
        if activity.busy or not activity.note(plan, problem.target):
            return False
        return self._may_measure(plan.device)

    def _begun(self, problem: Problem) -> bool:
        """Whether a call is to measure: no other does, and somebody still has tuning active."""
        self._activity.owe(1)  # first: whoever reads that it is measured may wait for its record
        with self._activity.lock:
            contexts = self._activity.contexts  # another thread may have closed the last since
            if problem.state == "ready" and contexts:
                problem.budget = max(problem.budget, contexts[-1].budget)
                problem.state = "measuring"
                return True
        self._activity.owe(-1)
        return False

    def _try(self, problem: Problem, plan: Plan[Any, Any]) -> None:
        """Measure a problem, if that is this call's to do."""
        present = problem.present
        if present is None or not self._begun(problem):
            return
        began = time.monotonic()
        outcome: Measured | str = "the call that measured it was interrupted"
        try:
            problem.close()
            kept = (problem.default,) if problem.default in problem.candidates else ()
            with self._activity.measuring():
                outcome = self._measure(
                    problem.operation,
                    problem.shape,
                    plan.device,
                    present,
                    kept,
                    problem.candidates,
                    problem.budget,
                )
        except NotMeasured as error:
            outcome = str(error)
        except Exception as error:
            outcome = first_line(error)
            logger.warning("autotune: %s: %s", problem, outcome)
        finally:  # Ctrl-C, too, ends with an outcome
            self._activity.tell(self._take, problem, outcome, time.monotonic() - began)

    @staticmethod
    def _swap(plan: Plan[Any, Any], choice: Choice, offer: Callable[[], None]) -> None:
        """Give a plan the launches of another kernel, if they can be laid out.

        Not where its gate was taken away meanwhile: nobody has tuning active, or it is of a later
        choice.
        """
        draft = plan.draft
        try:
            launch = plan_launches(
                choice.spec, draft.problem, plan.device, draft.tensors, draft.scalars
            )
        except WarploomError as error:
            logger.warning("autotune: %s stays: %s", plan.choice.spec.name, error)
            shut(plan)
            return
        swap(plan, choice, launch, offer)
