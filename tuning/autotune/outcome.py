"""What measuring a problem came to: its record, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from warploom.errors import WarploomError
from warploom.generator import build as building
from warploom.generator.records import RUNNERS_UP, Record, Timed
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec, parse_name
from warploom.generator.store import source_digest
from warploom.runtime import kernel as kernels
from warploom.runtime.records import environment
from warploom.tuning.autotune.contest import Measured
from warploom.tuning.autotune.problem import Problem
from warploom.tuning.autotune.report import Tuned


def fetched(names: Sequence[str]) -> list[KernelSpec]:
    """The kernels of these names that the store has, read so that no call waits for them."""
    found = []
    for name in names:
        with suppress(WarploomError):
            spec = parse_name(name)
            building.build(spec, kernels.store(), policy="forbid")
            kernels.kernel(spec)
            found.append(spec)
    return found


def record_of(problem: Problem, outcome: Measured) -> Record:
    """What was measured, as records have it."""
    times = {
        spec: Timed(spec.schedule, timing.median, timing.spread)
        for spec, timing in outcome.timings.items()
    }
    others = sorted(
        (spec for spec in times if spec not in (outcome.winner, problem.default)),
        key=lambda spec: times[spec].seconds,
    )
    return Record(
        problem.operation,
        problem.shape,
        environment(problem.target, problem.operation.family),
        times[outcome.winner],
        times.get(problem.default) if problem.default else None,
        tuple(times[spec] for spec in others[:RUNNERS_UP]),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        templates=source_digest(render(outcome.winner))[:16],
        autotuned=True,
    )


def tuned(problem: Problem, outcome: Measured, seconds: float) -> Tuned:
    """What is told of a problem that was tuned `seconds` after it was met."""
    present, winner = problem.present or outcome.winner, outcome.winner
    return Tuned(
        str(problem),
        "tuned",
        present.name,
        outcome.timings[present].median,
        winner.name,
        outcome.timings[winner].median,
        outcome.spent,
        seconds,
        "default kept" if winner == present else "improved",
    )
