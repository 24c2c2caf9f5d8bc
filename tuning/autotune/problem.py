"""A problem that calls have met without a record, its plans, and the gate on their launches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from warploom.generator.launches import DeviceLimits
from warploom.generator.locks import fork_lock
from warploom.generator.records import problem_text
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation
from warploom.runtime.dispatch import Choice
from warploom.runtime.launch_plan import Launched, LaunchPlan
from warploom.runtime.plan import Plan
from warploom.tuning.autotune.locks import ProblemLock
from warploom.tuning.autotune.report import Tuned

State = Literal[
    "new", "elsewhere", "compiling", "ready", "measuring", "recorded", "tuned", "failed"
]
Key = tuple[DeviceLimits, Operation, Shape]

UNHEARD = "about to be compiled"  # the status of a problem before the engine's thread hears of it


_gates = fork_lock()  # guards which launches a plan has: several threads change them


class Gate(LaunchPlan):
    """A plan's launches, before each of which something is offered the thread that calls.

    meets   it only tells of the plan's next call, and gives way to any other
    """

    def __init__(self, real: LaunchPlan, offer: Callable[[], None], *, meets: bool) -> None:
        self.__dict__.update(real.__dict__)  # what else is read of them
        self.real, self.meets, self.offer = real, meets, offer

    def run(
        self,
        addresses: tuple[int, ...],
        scalars: tuple[float, ...],
        check: Callable[..., object],
        *given: object,
    ) -> Launched:
        """Make the offer, then launch as the call was planned."""
        self.offer()
        return self.real.run(addresses, scalars, check, *given)


@dataclass
class Problem:
    """One problem on one kind of GPU; what is in it belongs to the engine's thread.

    `state` is changed by calling threads as well, from "ready" to "measuring". It becomes "ready",
    "tuned" and "failed", and is read by others, under the lock of the activity only: what belongs
    to a state, such as gates and a reason, is there as soon as anybody reads that state.
    """

    target: DeviceLimits
    operation: Operation
    shape: Shape
    began: float
    state: State = "new"
    reason: str = ""
    compiling: int = 0
    budget: float = 0.0
    present: KernelSpec | None = None
    default: KernelSpec | None = None
    candidates: tuple[KernelSpec, ...] = ()
    lock: ProblemLock | None = None
    told: Tuned | None = None
    interrupted: bool = False  # gates were taken away before they let a call through
    _plans: list[weakref.ref[Plan[Any, Any]]] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """What there is one problem of."""
        return self.target, self.operation, self.shape

    def __str__(self) -> str:
        """The operation and the shape, for people."""
        return problem_text(self.operation, self.shape)

    @property
    def status(self) -> str:
        """How it stands."""
        match self.state:
            case "new":
                return UNHEARD
            case "elsewhere":
                return "another process tunes it"
            case "compiling":
                return f"compiling {self.compiling or 'its'} candidates"
            case "ready":
                return "waiting for a call outside a capture"
            case "measuring" | "recorded":
                return "measured; its kernel runs from a next call on"
            case "failed":
                return f"not tuned: {self.reason}"
        return "tuned"

    @property
    def standing(self) -> Tuned:
        """How it stands, with what was measured."""
        if self.state == "failed":
            return Tuned(str(self), self.status, outcome="not tuned")
        if self.state != "tuned":
            return Tuned(str(self), self.status)
        return self.told or Tuned(str(self), self.status, outcome="recorded before")

    def add(self, plan: weakref.ref[Plan[Any, Any]]) -> None:
        """Keep a plan of this problem, which lives as long as others use it."""
        found = plan()
        alive = [ref for ref in self._plans if (kept := ref()) is not None and kept is not found]
        self._plans = [*alive, plan]

    def plans(self) -> list[Plan[Any, Any]]:
        """The plans that are still used."""
        return [plan for ref in self._plans if (plan := ref()) is not None]

    def open(self, offer: Callable[[Plan[Any, Any]], Callable[[], None]]) -> None:
        """Put a gate before the launches of every plan."""
        for plan in self.plans():
            gate(plan, offer(plan))

    def close(self) -> bool:
        """Take the gates away; True if there were any."""
        gated = [shut(plan) for plan in self.plans()]  # every one, not until the first
        return any(gated)


def gate(plan: Plan[Any, Any], offer: Callable[[], None], *, meets: bool = False) -> None:
    """Put a gate before a plan's launches, in place of one that is there and only meets.

    A plan that has none, on the CPU, only meets.
    """
    with _gates:
        launch = plan.launch
        if isinstance(launch, Gate):
            if meets or not launch.meets:
                return
            launch = launch.real
        if launch is not None:
            plan.relaunch(plan.choice, Gate(launch, offer, meets=meets))
        elif meets:
            for name in _RUNNING:
                vars(plan).setdefault(name, _telling(plan, name, offer))


_RUNNING = ("run", "run_at")  # methods of a plan that a call passes


def _telling(plan: Plan[Any, Any], name: str, offer: Callable[[], None]) -> Callable[..., Any]:
    """A method of a plan without launches, which first makes the offer."""
    kept = weakref.ref(plan)

    def told(*given: Any) -> Any:  # noqa: ANN401 (as the method has it)
        offer()
        called = kept()
        return getattr(type(called), name)(called, *given)

    return told


def shut(plan: Plan[Any, Any], choice: Choice | None = None, *, meets: bool = False) -> bool:
    """Take away a plan's gate, or with `meets` one that only meets; True if there was one.

    `choice` tells anew why its kernel is its own.
    """
    with _gates:
        launch, gated = plan.launch, False
        if isinstance(launch, Gate) and launch.meets is meets:
            launch, gated = launch.real, True
        if launch is not None and (gated or choice is not None):
            plan.relaunch(choice or plan.choice, launch)
        if meets:
            for name in _RUNNING:
                vars(plan).pop(name, None)
        return gated


def swap(
    plan: Plan[Any, Any], choice: Choice, launch: LaunchPlan, offer: Callable[[], None]
) -> None:
    """Have a plan run another kernel in place of the gate that makes this offer, if it is there."""
    with _gates:
        gated = plan.launch
        if isinstance(gated, Gate) and gated.offer is offer:
            plan.relaunch(choice, launch)
