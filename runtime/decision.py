"""What records and the model say of a problem: pure functions of what is known of it.

Each is told the kernels that it may choose from, and returns None where it has nothing to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from warploom.generator.families import family
from warploom.generator.gpus import kind
from warploom.generator.model import Constants, predict, rank
from warploom.generator.records import Environment, Record, Records
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation, Schedule
from warploom.runtime.records import Known, Lender, lent

# ---- The record that says most -------------------------------------------------------------------
#
# A record of another kind is as many octaves away as its shape and its kind together: where n and k
# are the same, one of m 512 of a kind at 0.5 octaves says as much of m 512 as an own one of m 360.

# Octaves between kinds with as many SMs within which the same schedule is best: what is measured is
# surer than what the model makes of it. An H100 and an H200 are 0.54 apart, all of it bandwidth.
CLOSE = 0.75


@dataclass(frozen=True, slots=True)
class Near:
    """A record, and what carries its times to the problem.

    measured     the environment that it would have to be of, not to be stale
    there, here  constants of the GPU kind that it is of, and of the one at hand
    certain      why its best schedule is taken as it is; empty where the model has a say
    lender       the other kind that it is of; empty for an own one
    close        whether it says something without a model, too
    """

    record: Record
    measured: Environment
    there: Constants | None
    here: Constants | None
    certain: str = ""
    lender: str = ""
    close: bool = True


def near(
    known: Known, operation: Operation, shape: Shape, here: Environment, within: float
) -> Near | None:
    """Return the record that says most of a problem that has none of its own.

    Args:
        known: What is known of the GPU kind at hand.
        operation: What is computed.
        shape: Of the problem.
        here: The environment at hand.
        within: Octaves to a record of another layer that has a say.
    """
    own = known.constants
    if found := _between(known.records, operation, shape, here):
        return Near(found[0], here, own, own, found[1])
    every: list[tuple[tuple[bool, bool, float], Near]] = []
    if record := known.records.nearest(operation, shape, here, within):
        every.append((record.nearness(shape, here), Near(record, here, own, own)))
    fitted = own.families.get(operation.family) if own else None
    for lender in lent(here.gpu, operation.family):
        # An own model knows better than another kind's record of another layer.
        further = 0.0 if fitted is None or fitted.fitted_on else lender.octaves
        if one := _lent(lender, operation, shape, here, within - further):
            stale, other, octaves = one.record.nearness(shape, one.measured)
            every.append(((stale, other, octaves + lender.octaves), one))
    return min(every, key=lambda one: one[0])[1] if every else None


def _lent(
    lender: Lender, operation: Operation, shape: Shape, here: Environment, within: float
) -> Near | None:
    """The record that says most among those that another kind lends."""
    gpu = lender.records.gpu
    there = replace(here, gpu=gpu, multiprocessors=kind(gpu).multiprocessors)
    close = there.multiprocessors == here.multiprocessors and lender.octaves <= CLOSE
    found = _between(lender.records, operation, shape, there) if close else None
    record = found[0] if found else lender.records.nearest(operation, shape, there, within)
    if record is None:
        return None
    certain = found[1] if found else ""
    if close and record.shape == shape:
        certain = "a kind so close has the same best schedule"
    return Near(record, there, lender.fitted, lender.here, certain, gpu, close)


def _between(
    records: Records, operation: Operation, shape: Shape, here: Environment
) -> tuple[Record, str] | None:
    """The nearer of a layer's records next to a shape, where both have one best schedule; and why.

    A shape with a record of its own is between none.
    """
    found = records.around(operation, shape, here)
    if found is None or records.exact(operation, shape, here):
        return None
    below, above = found
    if below.best.schedule != above.best.schedule:
        return None
    record = min(found, key=lambda one: one.nearness(shape, here))
    return record, f"as do those of {below.shape} and {above.shape}, between which it is"


# ---- What records and the model say --------------------------------------------------------------

Specs = Mapping[Schedule, KernelSpec]  # of a record's schedules, where a call can have them

SHOWN = 4  # runners-up that are told
NOT_TIMED = "nothing was timed on this GPU kind"  # of a choice by what another one lends


@dataclass(frozen=True, slots=True)
class Alternative:
    """A kernel, and the seconds that it took (`recorded`) or should take (`predicted`)."""

    spec: KernelSpec
    seconds: float
    source: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What a kernel was chosen for.

    requires   what the tensors of the call ask of a schedule, as the family has it
    recorded   there is a record of this very problem
    """

    operation: Operation
    shape: Shape
    requires: object
    recorded: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of a problem, why it is this one, and what came next.

    seconds   recorded or predicted, as the reason says; None where neither decided
    asked     what it was chosen for; None where the call named the kernel
    """

    spec: KernelSpec
    reason: str
    seconds: float | None = None
    runners_up: tuple[Alternative, ...] = ()
    asked: Asked | None = field(default=None, compare=False, repr=False)


def recorded(record: Record | None, specs: Specs) -> Choice | None:
    """The best of the record of this very problem."""
    if record is None:
        return None
    found = [
        Alternative(specs[one.schedule], one.seconds, "recorded")
        for one in record.contenders
        if one.schedule in specs
    ]
    if not found:
        return None
    how = "autotuned" if record.autotuned else "recorded"
    told = f"{how} {record.measured[:10]} at this shape"
    if record.speedup is not None:
        told += f", {record.speedup:.3f} times as fast as the default"
    if record.noisy:
        told += ", with unsteady clocks"
    return _first_of(found, told)


def carried(
    near: Near | None, specs: Specs, untuned: KernelSpec, shape: Shape, here: Environment
) -> Choice | None:
    """The best of the nearest record's contenders and the default, as the model carries them.

    Beside a record of the same layer the default, which is only predicted, has to be faster by more
    than the model's doubt. Carried times are off by 1 % where tiles stay as many and by 4 % where m
    is half or twice; a kernel that was predicted to take the least is one that a model is too kind
    to. Where n and k differ, other tiles fit, and the model sees that better. Where the record's
    best is certain, the model only carries its time.
    """
    if near is None:
        return None
    record, name = near.record, untuned.operation.family
    found: list[Alternative] = []
    factors: list[float] = []
    for one in record.contenders:
        if one.schedule not in specs:
            continue
        spec = specs[one.schedule]
        there = predict(near.there, spec, record.shape, record.environment.multiprocessors)
        now = predict(near.here, spec, shape, here.multiprocessors)
        factor = now / there if now and there else 1.0
        found.append(Alternative(spec, one.seconds * factor, "predicted"))
        if there and now:
            factors.append(math.log(one.seconds / there))
    if not found or not (factors or near.close):
        return None
    if not family(name).constants and untuned not in specs.values():
        return None  # with no model at all, it tells of shapes where the same is run untuned
    found.sort(key=lambda one: one.seconds)
    told = f"nearest record, {record.shape}{f' on {near.lender}' if near.lender else ''}"
    told += ", carried over by the model" if factors else ", as it is: no model of this GPU"
    best = specs.get(record.best.schedule)
    if near.certain and best:
        found.sort(key=lambda one: one.spec != best)
        told += f"; its best schedule is taken: {near.certain}"
    elif near.here and factors and untuned not in [one.spec for one in found]:
        quickest = found[0].seconds
        seconds = predict(near.here, untuned, shape, here.multiprocessors) or math.inf
        usual = seconds * math.exp(sum(factors) / len(factors))
        doubt = near.here.families[name].doubt
        hurdle = doubt if record.shape.layer == shape.layer else 1
        found.append(Alternative(untuned, usual, "predicted"))
        found.sort(key=lambda one: one.seconds * (hurdle if one.spec == untuned else 1))
        if found[0].spec == untuned:
            told += f"; predicted to be {quickest / usual:.2f} times as fast as the best of it"
    if stale := record.environment.differences(near.measured):
        told += f"; stale: {'; '.join(stale)}"
    if near.lender:
        told += f"; {NOT_TIMED}"
    return _first_of(found, told)


def modelled(
    constants: Constants, specs: Iterable[KernelSpec], shape: Shape, here: Environment
) -> Choice | None:
    """The model's choice of these."""
    ranked = rank(constants, dict.fromkeys(specs), shape, here.multiprocessors)
    found = [Alternative(one.spec, one.seconds, "predicted") for one in ranked]
    if not found:
        return None
    told = "the model alone: nothing near was recorded"
    if other := constants.families[found[0].spec.operation.family].fitted_on:
        told += f"; its constants are those of {other}, rescaled; {NOT_TIMED}"
    return _first_of(found, told)


def _first_of(found: list[Alternative], reason: str) -> Choice:
    best, *others = found
    return Choice(best.spec, reason, best.seconds, tuple(others[:SHOWN]))
