"""Constants from measurements: least squares on the logarithms of times.

What counts most is how schedules of one problem compare, so a problem's mean error, which clocks
and power cause, has a smaller weight than what is left of each measurement. The fast ones count for
more: a sweep is mostly of schedules that nobody would choose, slow for reasons of their own.
Constants are fitted by their logarithms, and drawn weakly to the hardware's figures where
measurements do not tell (Gauss-Newton with damping, after Levenberg and Marquardt).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from warploom.errors import RecordsError
from warploom.generator.families import family, names
from warploom.generator.gpus import kind
from warploom.generator.model.constants import Constants, FamilyConstants, Quality
from warploom.generator.model.predict import proposals, rank
from warploom.generator.records import problem_text
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation, Schedule

MEAN_WEIGHT = 0.3  # of a problem's mean error, beside 1 for how its schedules compare
# A measurement weighs 1 / e of the best where it takes this share longer, but never less than that.
# Between 0.1 and 0.3, and 0.02 and 0.05, the sweeps' quality is the same.
BEHIND, LEAST = 0.15, 0.05
PULL = 0.15  # towards the start: of one measurement's error of 100 %, for a constant e times off
ROUNDS = 60
SWEPT = 150  # schedules of one problem that make a sweep,
WHOLE = 0.9  # or this share of all that are legal, or that the model chooses among
FIRST = 12  # schedules that the model proposes
NEAR = 1.03  # what they must be within, of the best known
Vector = np.ndarray[Any, np.dtype[np.float64]]
Legal = Callable[[Operation, Shape], int]
Choosable = Callable[[Operation, Shape], Collection[Schedule]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The seconds that a schedule of an operation took for a shape."""

    operation: Operation
    shape: Shape
    schedule: Schedule
    seconds: float
    multiprocessors: int


def fit(
    gpu: str,
    measurements: Sequence[Measurement],
    known: Constants | None = None,
    legal: Legal = lambda operation, shape: 0,
    unseen: Sequence[Measurement] = (),
    choosable: Choosable = lambda operation, shape: (),
) -> Constants:
    """Return constants of every family measured; those of the others are `known`'s.

    What they are worth the sweeps of `unseen` say, of problems that they are not fitted to. `legal`
    counts the schedules that a problem can be swept over, 0 where that is not known, `choosable`
    has those that the model may choose among. Raises RecordsError where nothing was measured, and
    for a problem that is in both.
    """
    if not measurements:
        raise RecordsError(
            "no measurement of a correct kernel",
            rule="constants are fitted from measurements",
            fix="give the journal of a tuning run, or a result of the benchmarks",
        )
    if both := {_problem(one) for one in unseen} & {_problem(one) for one in measurements}:
        operation, shape = min(both, key=str)
        raise RecordsError(
            f"{problem_text(operation, shape)} among the unseen",
            rule="must not be fitted to",
            fix="draw the unseen problems by another seed",
        )
    families = dict(known.families) if known and known.gpu == gpu else {}
    for name in names():
        own = [one for one in measurements if one.operation.family == name]
        if own and family(name).constants:
            held = [one for one in unseen if one.operation.family == name]
            found, arch = _fit(name, own), kind(gpu).arch
            worth = quality(name, found.values, held, legal, choosable, arch)
            families[name] = replace(found, quality=worth)
    return Constants(gpu, measurements[0].multiprocessors, families)


def _problem(one: Measurement) -> tuple[Operation, Shape]:
    return one.operation, one.shape


def _fit(name: str, measured: Sequence[Measurement]) -> FamilyConstants:
    start, seconds = family(name).constants, family(name).seconds
    keys = list(start)
    groups = _groups(measured)
    weights = [_weights(group) for group in groups]
    begin = np.log(list(start.values()))

    def errors(logarithms: Vector) -> Vector:
        values = dict(zip(keys, np.exp(logarithms).tolist(), strict=True))
        found = []
        for group, weight in zip(groups, weights, strict=True):
            own = np.array([_error(seconds, values, one) for one in group])
            mean = np.average(own, weights=weight)
            found += [np.sqrt(weight) * (own - mean)]
            found += [[MEAN_WEIGHT * math.sqrt(weight.sum()) * mean]]
        return np.concatenate([*found, PULL * (logarithms - begin)])

    fitted = _least_squares(errors, begin)
    values = dict(zip(keys, np.exp(fitted).tolist(), strict=True))
    off = median(abs(_error(seconds, values, one)) for one in measured)
    told = (_slopes(errors, fitted)[: -len(keys)] ** 2).sum(axis=0)
    assumed = tuple(key for key, size in zip(keys, told, strict=True) if size < PULL**2)
    return FamilyConstants(values, len(measured), len(groups), off, assumed)


def _error(seconds: Any, values: Mapping[str, float], one: Measurement) -> float:  # noqa: ANN401
    predicted = seconds(values, one.operation, one.schedule, one.shape, one.multiprocessors)
    return math.log(predicted / one.seconds)


def _weights(group: Sequence[Measurement]) -> Vector:
    """What the measurements of one problem count for: the best 1, others less."""
    best = min(one.seconds for one in group)
    return np.array([max(LEAST, math.exp((1 - one.seconds / best) / BEHIND)) for one in group])


def _groups(measured: Iterable[Measurement]) -> list[list[Measurement]]:
    """The measurements of each problem."""
    found: dict[tuple[Operation, Shape], list[Measurement]] = {}
    for one in measured:
        found.setdefault(_problem(one), []).append(one)
    return list(found.values())


def _least_squares(errors: Any, begin: Vector) -> Vector:  # noqa: ANN401 (a function of vectors)
    at, damping = begin, 1e-2
    now = errors(at)
    for _ in range(ROUNDS):
        slopes = _slopes(errors, at)
        square, down = slopes.T @ slopes, slopes.T @ now
        while damping < 1e8:
            step = np.linalg.solve(square + damping * np.eye(len(at)), -down)
            step = np.clip(step, -1, 1)
            there = errors(at + step)
            if there @ there < now @ now:
                break
            damping *= 4
        else:
            break
        gained = float(now @ now - there @ there) / float(now @ now)
        at, now, damping = at + step, there, damping / 4
        if gained < 1e-6:
            break
    return at


def _slopes(errors: Any, at: Vector) -> Vector:  # noqa: ANN401 (a function of vectors)
    """The derivative of every error by every logarithm of a constant."""
    now = errors(at)
    return np.stack([(errors(at + step) - now) / 1e-4 for step in np.eye(len(at)) * 1e-4], axis=1)


def quality(
    name: str,
    values: Mapping[str, float],
    measured: Sequence[Measurement],
    legal: Legal,
    choosable: Choosable,
    arch: str,
) -> Quality | None:
    """Hold a model against every problem of which enough schedules were measured.

    SWEPT are more than a search measures, which begins with what a model proposes; small spaces are
    measured nearly whole. Of fewer, where they have nearly all that it may choose among, it chooses
    among these, and the best of all counts. None where there is no such problem: a model that was
    held against none decides nothing.
    """
    fitted = FamilyConstants(values, 0, 0, 0.0)
    firsts, kept = [], []
    for group in _groups(measured):
        one = group[0]
        times = {m.schedule: m.seconds for m in group}
        among: Collection[Schedule] = times
        if len(times) < min(SWEPT, WHOLE * (legal(one.operation, one.shape) or math.inf)):
            every = choosable(one.operation, one.shape)
            among = [schedule for schedule in every if schedule in times]
            if len(among) < max(1, WHOLE * len(every)):
                continue
        constants = Constants("", one.multiprocessors, {name: fitted})
        specs = [KernelSpec(arch, one.operation, schedule) for schedule in among]
        ranked = rank(constants, specs, one.shape, one.multiprocessors)
        proposed = [times[spec.schedule] for spec in proposals(ranked, FIRST)]
        best = min(times.values())
        firsts.append(math.log(proposed[0] / best))
        kept.append(min(proposed) <= NEAR * best)
    if not firsts:
        return None
    return Quality(len(firsts), math.exp(sum(firsts) / len(firsts)), sum(kept) / len(kept))
