"""Predictions: a family's arithmetic with the constants of a GPU kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from warploom.generator.families import family
from warploom.generator.knob import knobs
from warploom.generator.model.constants import Constants
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Schedule


@dataclass(frozen=True, slots=True)
class Prediction:
    """A kernel and the seconds that it should take."""

    spec: KernelSpec
    seconds: float


def predict(
    constants: Constants | None, spec: KernelSpec, shape: Shape, multiprocessors: int
) -> float | None:
    """Return the seconds that `spec` should take for `shape`; None where no model knows."""
    name = spec.operation.family
    fitted = constants and constants.families.get(name)
    if not fitted or not family(name).constants:
        return None
    return _seconds(fitted.values, spec, shape, multiprocessors)


def _seconds(
    values: Mapping[str, float], spec: KernelSpec, shape: Shape, multiprocessors: int
) -> float:
    known = family(spec.operation.family)
    return known.seconds(values, spec.operation, spec.schedule, shape, multiprocessors)


def rank(
    constants: Constants | None, specs: Iterable[KernelSpec], shape: Shape, multiprocessors: int
) -> list[Prediction]:
    """Return `specs` by predicted time, the least first.

    Of equal ones that with more fields at their defaults comes first, then canonical JSON decides.
    Without constants of the family, its model's starting values rank, which no fit has touched. A
    family without a model has infinite times, and this order alone.
    """
    predictions = []
    for spec in specs:
        found = predict(constants, spec, shape, multiprocessors)
        if found is None:
            start = family(spec.operation.family).constants
            found = _seconds(start, spec, shape, multiprocessors)
        predictions.append(Prediction(spec, found))
    return sorted(predictions, key=lambda one: (one.seconds, *preference(one.spec)))


def preference(spec: KernelSpec) -> tuple[int, str]:
    """The order of specs that nothing else tells apart."""
    schedule = spec.schedule
    unusual = sum(getattr(schedule, f.name) != f.default for f in fields(schedule))
    return unusual, spec.canonical_json


def proposals(
    ranked: Sequence[Prediction], count: int, beside: Iterable[KernelSpec] = ()
) -> list[KernelSpec]:
    """The first `count` of a ranking that differ in what the model can tell and beyond details.

    None differs in details alone from one of those that it is `beside`.

    Of schedules with one predicted time, which differ in a field that it does not know, it proposes
    the first; so it does of those that differ in details alone, which a search tries later. (The
    best of 12 was within 3 % of the best known in 13 of 13 sweeps of products, in 12 with them.)
    """
    found: list[KernelSpec] = []
    seen: set[object] = {_without_details(spec) for spec in beside}
    for one in ranked:
        if len(found) == count:
            break
        told = float(f"{one.seconds:.9g}")
        kinds = {told if math.isfinite(told) else one.spec, _without_details(one.spec)}
        if not kinds & seen:
            found.append(one.spec)
        seen |= kinds
    return found


def _without_details(spec: KernelSpec) -> Schedule:
    """The schedule with the usual details."""
    said = knobs(type(spec.schedule))
    usual = {f.name: f.default for f in fields(spec.schedule) if said[f.name].detail}
    return replace(spec.schedule, **usual)
