"""What is kept and told of a run: results, progress, records, and how problems ended.

Every result is in the journal before it is used; a problem's record is saved as soon as its search
ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from warploom.generator.records import Environment, Record
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.store import source_digest
from warploom.tuning.journal import Entry, Journal, Result
from warploom.tuning.judgement import Judgement
from warploom.tuning.problems import Problem
from warploom.tuning.search import Search

Status = Literal["tuned", "recorded before", "failed", "not reached"]


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


class Account:
    """What a run of so many problems keeps and tells, in the order in which that comes.

    left    seconds of the budget
    save    takes a finished record; watch is told how the run stands; alarm of a wrong result
    """

    def __init__(
        self,
        journal: Journal,
        environments: Mapping[str, Environment],
        total: int,
        *,
        left: Callable[[], float],
        save: Callable[[Record], object],
        watch: Callable[[Progress], None],
        alarm: Callable[[str], None],
    ) -> None:
        self.ended: list[Ended] = []
        self._journal, self._environments, self._total = journal, environments, total
        self._left, self._save, self._watch, self._alarm = left, save, watch, alarm

    def note(self, problem: Problem, results: Mapping[KernelSpec, Result]) -> None:
        """Put results into the journal; what is wrong is said loudly."""
        operation, shape = problem.operation, problem.shape
        here = self._environments[operation.family]
        self._journal.add(*(Entry(operation, shape, here, one) for one in results.values()))
        for spec, result in results.items():
            if result.outcome == "wrong":
                self._alarm(f"WRONG RESULT: {spec.name} at {problem}: {result.reason}")

    def tell(self, problem: Problem, search: Search) -> None:
        """Say how the run stands, and the best that a problem's search has found."""
        found = search.results[search.best] if search.best else None
        text = str(problem)
        if found and found.seconds:
            text += f": best so far {found.seconds * 1e6:.1f} us"
            if found.relative:
                text += f", {1 / found.relative:.3f} x default"
        self._watch(Progress(len(self.ended), self._total, max(0.0, self._left()), text))

    def known(self, problem: Problem, record: Record) -> None:
        """End a problem that has a record."""
        self.ended.append(Ended(problem, "recorded before", record, {}))

    def without(self, problem: Problem, reason: str) -> None:
        """End a problem that cannot be searched."""
        self.ended.append(Ended(problem, "failed", None, {}, reason))

    def end(self, problem: Problem, search: Search) -> None:
        """End a problem whose search has, or was cut short: with its record, if it has one now."""
        outcomes: Counter[str] = Counter(one.outcome for one in search.results.values())
        timed = search.timed() if search.stage == "done" or _correct_twice(search) else None
        best = search.winner() if timed else None
        if timed is None or best is None:
            failed = bool(search.results) and not outcomes["correct"]
            reason = _reasons(search) if failed else ""
            status: Status = "failed" if failed else "not reached"
            self.ended.append(Ended(problem, status, None, outcomes, reason))
            return
        if isinstance(search, Judgement) and best == search.present:
            self.ended.append(Ended(problem, "recorded before", search.record, outcomes))
            return
        record = Record(
            problem.operation,
            problem.shape,
            self._environments[problem.operation.family],
            *timed,
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            noisy=any(result.noisy for result in search.contenders().values()),
            templates=source_digest(render(best))[:16],
        )
        self._save(record)
        self.ended.append(Ended(problem, "tuned", record, outcomes))
        self.tell(problem, search)


def _correct_twice(search: Search) -> bool:
    """Whether a search that was cut short knows the default and another in one loop."""
    return search.default in search.contenders() and len(search.contenders()) > 1


def _reasons(search: Search) -> str:
    counts = Counter(f"{one.outcome}: {one.reason}" for one in search.results.values())
    return "; ".join(f"{reason} ({count})" for reason, count in counts.most_common(2))
