"""A problem that calls have met without a record, its plans, and the gate on their launches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from warploom.generator.launches import DeviceLimits
from warploom.generator.records import problem_text
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation
from warploom.runtime.call import Draft
from warploom.runtime.decision import Choice
from warploom.runtime.launch_plan import Launched, LaunchPlan
from warploom.runtime.plan import Plan
from warploom.tuning.autotune.locks import ProblemLock

State = Literal[
    "new", "elsewhere", "compiling", "ready", "measuring", "recorded", "tuned", "failed"
]
Key = tuple[DeviceLimits, Operation, Shape]


class Gate(LaunchPlan):
    """A plan's launches, before each of which something is offered the thread that calls."""

    def __init__(self, real: LaunchPlan, offer: Callable[[], None]) -> None:
        self.__dict__.update(real.__dict__)  # what else is read of them
        self.real, self._offer = real, offer

    def run(
        self,
        addresses: tuple[int, ...],
        scalars: tuple[float, ...],
        check: Callable[..., object],
        *given: object,
    ) -> Launched:
        """Make the offer, then launch as the call was planned."""
        self._offer()
        return self.real.run(addresses, scalars, check, *given)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, which lives as long as others use it, and what it was laid out for."""

    plan: weakref.ref[Plan[Any, Any]]
    draft: Draft[Any]


@dataclass(frozen=True)
class Tuned:
    """How the tuning of a problem stands, for people.

    problem      the operation and the shape
    status       as `warploom.explain` tells it; "tuned" at the end
    before       the kernel that calls ran, and its seconds as measured
    after        the kernel that they run once it is tuned, and its seconds
    gpu_seconds  of measuring
    seconds      from the first call until the record was written
    """

    problem: str
    status: str
    before: str = ""
    before_seconds: float | None = None
    after: str = ""
    after_seconds: float | None = None
    gpu_seconds: float = 0.0
    seconds: float | None = None


@dataclass
class Problem:
    """One problem on one kind of GPU; what is in it belongs to the engine's thread.

    `state` is changed by calling threads as well, from "ready" to "measuring" and under its lock.
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
    _plans: list[Planned] = field(default_factory=list)

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
                return "about to be compiled"
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

    def add(self, planned: Planned) -> None:
        """Keep a plan of this problem."""
        self._plans = [one for one in self._plans if one.plan() is not None]
        self._plans.append(planned)

    def plans(self) -> Iterator[tuple[Plan[Any, Any], Planned]]:
        """The plans that are still used."""
        for one in list(self._plans):
            if (plan := one.plan()) is not None:
                yield plan, one

    def open(self, offer: Callable[[Plan[Any, Any], Planned], Callable[[], None]]) -> None:
        """Put a gate before the launches of every plan."""
        for plan, planned in self.plans():
            gate(plan, offer(plan, planned))

    def close(self) -> bool:
        """Take the gates away; True if there were any."""
        gated = [plan for plan, _ in self.plans() if isinstance(plan.launch, Gate)]
        for plan in gated:
            shut(plan)
        return bool(gated)


def gate(plan: Plan[Any, Any], offer: Callable[[], None]) -> None:
    """Put a gate before a plan's launches, if there is none."""
    if plan.launch is not None and not isinstance(plan.launch, Gate):
        plan.relaunch(plan.choice, Gate(plan.launch, offer))


def shut(plan: Plan[Any, Any], choice: Choice | None = None) -> None:
    """Take away a plan's gate, if it has one; `choice` tells anew why its kernel is its own."""
    launch = plan.launch.real if isinstance(plan.launch, Gate) else plan.launch
    if launch is not None and (launch is not plan.launch or choice is not None):
        plan.relaunch(choice or plan.choice, launch)
