"""The search that a problem begins with: of its space, or of its record beside few others."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.generator.launches import DeviceLimits
from warploom.generator.model import Constants, rank
from warploom.generator.records import Environment, Record, Records
from warploom.tuning.journal import Result
from warploom.tuning.judgement import LIKELY, RUNNERS_UP, Judgement
from warploom.tuning.problems import Problem, default, fitting, likeliest
from warploom.tuning.search import Search


def searched(
    problem: Problem,
    here: Environment,
    records: Records,
    constants: Constants | None,
    known: Sequence[Result],
    *,
    exhaustive: bool,
) -> Search:
    """The search among a problem's kernels, with what a near record has as a hint."""
    operation, shape = problem.operation, problem.shape
    device = DeviceLimits(here.multiprocessors, here.gpu)
    ranked = rank(constants, problem.space, shape, here.multiprocessors)
    near = records.nearest(operation, shape, here)
    hints = [fitting(operation, shape, near.best.schedule, device.arch)] if near else []
    return Search(
        default(operation, shape, device),
        ranked,
        [spec for spec in hints if spec],
        known,
        exhaustive=exhaustive,
    )


def judged(record: Record, here: Environment) -> Judgement:
    """The loop of a record beside what the model would choose."""
    operation, shape = record.operation, record.shape
    device = DeviceLimits(here.multiprocessors, here.gpu)
    others = [fitting(operation, shape, one.schedule, device.arch) for one in record.runners_up]
    usual = likeliest(operation, shape, device, LIKELY)
    return Judgement(
        record,
        default(operation, shape, device),
        [*usual, *(spec for spec in others[:RUNNERS_UP] if spec)],
    )
