"""What `warploom.autotune` tells of the calls that came while it was active."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from warploom.generator.launches import DeviceLimits
from warploom.generator.records import problem_text
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import Asked
from warploom.runtime.plan import Plan

Outcome = Literal[
    "improved", "default kept", "not finished", "not tuned", "recorded before", "named", "reference"
]

_TOLD: dict[str, str] = {
    "improved": "tuned, and a faster kernel runs",
    "default kept": "tuned, and no kernel was faster than the present one",
    "not finished": "not finished",
    "not tuned": "could not be tuned",
    "recorded before": "not tuned, because they had a tuned config already",
    "named": "not tuned, because the caller named the kernel (spec=)",
    "reference": "not tuned, because no kernel ran: the tensors are on the CPU, or are empty",
}
_NO_CALL = (
    "no call of a kernel came while it was active (neither replays of CUDA graphs count, nor calls "
    "that torch computes)"
)


@dataclass(frozen=True)
class Tuned:
    """How the tuning of a problem stands, for people.

    problem      the operation and the shape
    status       as `warploom.explain` tells it; "tuned" at the end
    before       the kernel that calls ran, and its seconds as measured
    after        the kernel that they run once it is tuned, and its seconds
    gpu_seconds  of measuring
    seconds      from the first call until the record was written
    outcome      what became of it, in a word or two; `Report.counts` has how often
    """

    problem: str
    status: str
    before: str = ""
    before_seconds: float | None = None
    after: str = ""
    after_seconds: float | None = None
    gpu_seconds: float = 0.0
    seconds: float | None = None
    outcome: Outcome = "not finished"

    def __str__(self) -> str:
        told = self.status
        if self.before_seconds is not None and self.after_seconds is not None:
            told = f"{self.before_seconds * 1e6:.1f} us"
            if self.outcome == "improved":
                told += f" -> {self.after_seconds * 1e6:.1f} us, by {self.after}"
            else:
                told += f", by {self.after}"
        return f"{self.outcome}: {self.problem}: {told}"


@dataclass(frozen=True)
class Report:
    """The problems whose calls came while a context was active; printed, a line each.

    problems   every one of them, in the order of their first calls
    """

    problems: tuple[Tuned, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many problems had each outcome; those that none had are left out."""
        found = Counter(one.outcome for one in self.problems)
        return {name: found[name] for name in get_args(Outcome) if found[name]}

    def __str__(self) -> str:
        if not self.problems:
            return f"warploom.autotune met 0 problems: {_NO_CALL}"
        many = len(self.problems)
        lines = [f"warploom.autotune met {many} problem{'s' if many > 1 else ''}:"]
        lines += [f"  {count} {_TOLD[name]}" for name, count in self.counts.items()]
        return "\n".join([*lines, *map(str, self.problems)])

    def __len__(self) -> int:
        return len(self.problems)

    def __iter__(self) -> Iterator[Tuned]:
        return iter(self.problems)


@dataclass(frozen=True, slots=True)
class Met:
    """What the first call of a problem was, as one context met it.

    outcome   "not finished" where it is to be tuned; else why it is not
    """

    target: DeviceLimits
    asked: Asked | None
    spec: KernelSpec
    outcome: Outcome

    def __str__(self) -> str:
        return problem_text(self.asked.operation, self.asked.shape) if self.asked else ""


class Meetings:
    """The problems that calls met while one context was active, and the budget of new ones.

    budget   seconds of GPU time for a new problem
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._plans: set[int] = set()
        self._met: dict[object, Met] = {}

    def has(self, plan: Plan[Any, Any]) -> bool:
        """Whether a call of this plan came already."""
        return plan.number in self._plans

    def note(self, plan: Plan[Any, Any], target: DeviceLimits) -> None:
        """Note a call of a plan, which no problem is met by twice."""
        if plan.number in self._plans:
            return
        self._plans.add(plan.number)
        met = Met(target, plan.choice.asked, plan.choice.spec, _outcome(plan))
        asked = met.asked
        key = (target, asked.operation, asked.shape) if asked else (target, plan.choice.spec)
        self._met.setdefault(key, met)

    def report(self, standing: Callable[[Met], Tuned]) -> Report:
        """What became of each; `standing` says it of those that are to be tuned."""
        return Report(tuple(_told(met, standing) for met in list(self._met.values())))

    def tunable(self, standing: Callable[[Met], Tuned]) -> list[Tuned]:
        """The same of those alone that are to be tuned."""
        return [standing(met) for met in list(self._met.values()) if met.outcome == "not finished"]


def _outcome(plan: Plan[Any, Any]) -> Outcome:
    if plan.launch is None:
        return "reference"
    if plan.choice.asked is None:
        return "named"
    return "recorded before" if plan.choice.asked.recorded else "not finished"


def _told(met: Met, standing: Callable[[Met], Tuned]) -> Tuned:
    match met.outcome:
        case "reference":
            return Tuned(str(met) or met.spec.name, "no kernel runs", outcome=met.outcome)
        case "named":
            return Tuned(met.spec.name, "the caller named it", outcome=met.outcome)
        case "recorded before":
            return Tuned(str(met), met.spec.name, outcome=met.outcome)
    return standing(met)
