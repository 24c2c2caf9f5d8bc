"""What a run begins with: each problem's search, and the kernel that every GPU is examined by.

A search is of a problem's whole space, or of its record beside few others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.model import Constants, rank
from warploom.generator.records import Environment, Record, Records
from warploom.generator.specification import KernelSpec
from warploom.runtime.records import lent
from warploom.tuning.gpu import Batch
from warploom.tuning.journal import Result
from warploom.tuning.judgement import LIKELY, RUNNERS_UP, Judgement
from warploom.tuning.problems import Problem, default, fitting, likeliest, usual
from warploom.tuning.search import Search

ANCHOR_SECONDS = 200e-6  # long enough that what a launch takes is no part of it
ANCHOR_PRECISION, ANCHOR_SETS = 0.002, 8


def anchor(problems: Sequence[Problem], here: Mapping[str, Environment]) -> Batch | None:
    """What every GPU is examined by: the default of the problem nearest to ANCHOR_SECONDS."""

    def default_of(problem: Problem) -> KernelSpec:
        found = here[problem.operation.family]
        device = DeviceLimits(found.multiprocessors, found.gpu)
        return default(problem.operation, problem.shape, device)

    def apart(problem: Problem) -> float:
        known = family(problem.operation.family)
        asked = (problem.operation, default_of(problem).schedule, problem.shape)
        multiprocessors = here[problem.operation.family].multiprocessors
        return abs(
            math.log(known.seconds(known.constants, *asked, multiprocessors) / ANCHOR_SECONDS)
        )

    chosen = min(problems, key=apart, default=None)
    if chosen is None:
        return None
    return Batch(
        chosen.operation, chosen.shape, (default_of(chosen),), ANCHOR_PRECISION, ANCHOR_SETS
    )


def searched(
    problem: Problem,
    here: Environment,
    records: Records,
    constants: Constants | None,
    known: Sequence[Result],
    *,
    exhaustive: bool,
) -> Search:
    """The search among a problem's kernels, with what near records have as hints.

    Records of other GPU kinds hint where calls are decided by them: where the package has none of
    the family for this kind.

    Where there is no model of a family, so that a ranking tells nothing, its table hints too.
    """
    operation, shape = problem.operation, problem.shape
    device = DeviceLimits(here.multiprocessors, here.gpu)
    ranked = rank(constants, problem.space, shape, here.multiprocessors)
    every = (records, *(one.records for one in lent(here.gpu, operation.family)))
    near = (one.nearest(operation, shape, here) for one in every)
    hints = [fitting(operation, shape, one.best.schedule, device.arch) for one in near if one]
    if not family(operation.family).constants:
        hints += usual(operation, shape, device)
    return Search(
        default(operation, shape, device),
        ranked,
        [spec for spec in hints if spec],
        known,
        exhaustive=exhaustive,
    )


def runnable(record: Record, here: Environment) -> bool:
    """Whether this version makes the best kernel of a record: others may have been of another."""
    arch = DeviceLimits(here.multiprocessors, here.gpu).arch
    return fitting(record.operation, record.shape, record.best.schedule, arch) is not None


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
