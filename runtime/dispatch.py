"""Which kernel a call gets: the spec that was given, what was tuned, else the family's table.

In this order: the given spec; the record of this very problem; that of the shape for the operation
that this one is timed as, such as a gate's for its GEMM; the record of the nearest shape of either,
whose times the model carries over; the model alone, where it was held against sweeps and found good
enough; the table. Where the model may decide alone, a record has a say if it is of the same layer,
or near. Where a GPU kind has no records or no model, another kind's are taken. A kernel is chosen
once for each kind of call: plans are kept. What records and the model say of a problem are pure
functions of what is known of it: each is given the kernels that it may choose from, or what makes
these of schedules, and returns None where it has nothing to say. No shape is decided by a branch
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from warploom.errors import ProblemError, SpecificationError
from warploom.generator import names
from warploom.generator.families import family
from warploom.generator.gpus import kind
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.locks import remember
from warploom.generator.model import Constants, predict, rank
from warploom.generator.records import Environment, Record, Records
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation, Schedule, parse_name
from warploom.runtime.records import Known, Lender, environment, known, lent
from warploom.runtime.tensors import shown

_PORTFOLIOS = 256  # kept, of operations; each is built once: it takes milliseconds
_portfolios: dict[object, list[KernelSpec]] = {}
_measured: dict[object, KernelSpec | None] = {}  # of records, each checked once
NEAR = 0.5  # octaves to a record of another layer that has a say beside a model that decides


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

Fit = Callable[[Schedule], KernelSpec | None]  # the kernel of a schedule, where a call can have it

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
    others    makes the kernels that came next, best first: a call runs none of them
    asked     what it was chosen for; None where the call named the kernel
    """

    spec: KernelSpec
    reason: str
    seconds: float | None = None
    others: Callable[[], Sequence[Alternative]] = field(default=tuple, compare=False, repr=False)
    asked: Asked | None = field(default=None, compare=False, repr=False)

    @property
    def runners_up(self) -> tuple[Alternative, ...]:
        """The kernels that came next, as far as they are told."""
        return tuple(self.others()[:SHOWN])


def recorded(record: Record | None, fit: Fit) -> Choice | None:
    """The best of the record of this very problem that a call can have, as `fit` says."""
    if record is None:
        return None
    best = next(_of_record(record, fit), None)
    if best is None:
        return None
    how = "autotuned" if record.autotuned else "recorded"
    told = f"{how} {record.measured[:10]} at this shape"
    if record.speedup is not None:
        told += f", {record.speedup:.3f} times as fast as the default"
    if record.noisy:
        told += ", with unsteady clocks"
    return Choice(best.spec, told, best.seconds, lambda: [*_of_record(record, fit)][1:])


def _of_record(record: Record, fit: Fit) -> Iterator[Alternative]:
    """The kernels of a record's schedules, of those that a call can have."""
    for timed in record.contenders:
        spec = fit(timed.schedule)
        if spec is not None:
            yield Alternative(spec, timed.seconds, "recorded")


def carried(
    near: Near | None, fit: Fit, untuned: KernelSpec, shape: Shape, here: Environment
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
        spec = fit(one.schedule)
        if spec is None:
            continue
        there = predict(near.there, spec, record.shape, record.environment.multiprocessors)
        now = predict(near.here, spec, shape, here.multiprocessors)
        factor = now / there if now and there else 1.0
        found.append(Alternative(spec, one.seconds * factor, "predicted"))
        if there and now:
            factors.append(math.log(one.seconds / there))
    if not found or not (factors or near.close):
        return None
    if not family(name).constants and untuned not in [one.spec for one in found]:
        return None  # with no model at all, it tells of shapes where the same is run untuned
    found.sort(key=lambda one: one.seconds)
    told = f"nearest record, {record.shape}{f' on {near.lender}' if near.lender else ''}"
    told += ", scaled by the cost model" if factors else ", as it is: no cost model of this GPU"
    best = fit(record.best.schedule)
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
    told = "cost model: no tuned config is near"
    if other := constants.families[found[0].spec.operation.family].fitted_on:
        told += f"; its constants are those of {other}, rescaled; {NOT_TIMED}"
    return _first_of(found, told)


def _first_of(found: list[Alternative], reason: str) -> Choice:
    best, *others = found
    return Choice(best.spec, reason, best.seconds, lambda: others)


# ---- The kernel of a call ------------------------------------------------------------------------


def choose(
    operation: Operation,
    shape: Shape,
    *,
    spec: KernelSpec | None = None,
    device: DeviceLimits = NO_GPU,
    requires: object = None,
) -> Choice:
    """Return the kernel for a shape of an operation on a GPU.

    `requires` is what the tensors of the call ask of a schedule, as the family has it (see
    generator/families/table.py). Raises ProblemError for an operation that is not legal, and for a
    given `spec` that computes another one, or that these tensors cannot have.
    """
    described = family(operation.family)
    described.require_legal(operation)
    if spec is not None:
        return Choice(_checked(spec, operation, requires), "the spec that was given")
    found, here = known(device.gpu), environment(device, operation.family)
    fit = partial(fitting, operation, shape, arch=device.arch, requires=requires)
    choice = recorded(found.records.exact(operation, shape, here), fit)
    asked = Asked(operation, shape, requires, recorded=choice is not None)
    unread = [*found.unread]
    if choice is None:
        plainer = described.table.timed_as(operation)
        alike = plainer == operation
        choice = None if alike else recorded(found.records.exact(plainer, shape, here), fit)
        if choice is not None:
            choice = replace(choice, reason=f"{choice.reason}, of {names.full(plainer)}")
        else:
            default = untuned(operation, shape, device, requires)
            within = math.inf if default.seconds is None else NEAR
            nearest = near(found, operation, shape, here, within)
            if nearest is None and not alike:
                nearest = near(found, plainer, shape, here, within)
            choice = carried(nearest, fit, default.spec, shape, here) or default
            unread += [why for one in lent(device.gpu, operation.family) for why in one.unread]
    reason = choice.reason
    if unread:
        reason += f"; not read: {'; '.join(unread)}"
    return replace(choice, reason=reason, asked=asked)


def named(spec: KernelSpec | str | None) -> KernelSpec | None:
    """The spec that was asked for, by itself or by name."""
    if isinstance(spec, str):
        return parse_name(spec)
    if spec is None or isinstance(spec, KernelSpec):
        return spec
    raise ProblemError(
        f"spec {shown(spec)} of type {type(spec).__name__}",
        rule="must be a KernelSpec or a kernel's name",
        fix="leave it out, or take the name that warploom.explain tells",
    )


def untuned(
    operation: Operation, shape: Shape, device: DeviceLimits, requires: object = None
) -> Choice:
    """Return what a legal operation gets without records: the model's choice, else the table's."""
    name, constants = operation.family, known(device.gpu).constants
    if constants and constants.decides(name) and family(name).table.modelled(operation):
        among = portfolio(operation, shape, device, requires)
        found = modelled(constants, among, shape, environment(device, name))
        if found:
            return found
    return tabled(operation, shape, device, requires)


def tabled(
    operation: Operation, shape: Shape, device: DeviceLimits, requires: object = None
) -> Choice:
    """Return the table's choice for a legal operation: what there is where no model decides."""
    table = family(operation.family).table
    best: tuple[tuple[float, ...], KernelSpec] | None = None
    row = None
    for row in table.rows(operation, shape):
        candidate = table.kernel(row, operation, shape, device.arch, requires)
        if candidate is None:
            continue
        order = table.order(row, candidate.schedule, shape, device, requires)
        if best is None or order < best[0]:
            best = order, candidate
    if best is None:
        if row is not None:
            table.refuse(row, operation, shape, device.arch, requires)
        raise SpecificationError(f"no schedule of the table is for {operation}")
    return Choice(best[1], table.reason(operation, shape, best[0]))


def fitting(
    operation: Operation, shape: Shape, schedule: Schedule, arch: str, requires: object = None
) -> KernelSpec | None:
    """Return the kernel of a schedule that was measured for other tensors, as these require it.

    None where there is no such kernel, and where it does not suit the shape. The operation is one
    that was found legal.
    """
    table = family(operation.family).table
    if not table.suits(schedule, shape):
        return None
    key = arch, operation, table.fitted(schedule, requires)
    if key in _measured:
        return _measured[key]
    spec = KernelSpec.of_legal(*key)
    remember(_measured, key, spec, _PORTFOLIOS)
    return spec


def portfolio(
    operation: Operation, shape: Shape, device: DeviceLimits, requires: object = None
) -> Iterator[KernelSpec]:
    """Every schedule of the table that an operation can have: what the model may choose from."""
    table = family(operation.family).table
    features = table.features(operation, shape)
    kind = (operation, device.arch, requires, *(features[name] for name in table.kinds))
    found = _portfolios.get(kind)
    if found is None:
        found = [*table.kernels(operation, shape, device.arch, requires)]
        remember(_portfolios, kind, found, _PORTFOLIOS)
    return (spec for spec in found if table.suits(spec.schedule, shape))


def _checked(spec: KernelSpec, operation: Operation, requires: object) -> KernelSpec:
    table = family(operation.family).table
    have = spec.operation
    if have.family != operation.family or not table.serves(have, operation):
        raise ProblemError(
            f"spec {spec.name}",
            rule=f"computes another operation; this call needs {names.full(operation)}",
            fix="leave spec out, or pass one of this operation",
        )
    if lacking := table.lacks(spec.schedule, requires):
        rule, fix = lacking
        raise ProblemError(f"spec {spec.name}", rule=rule, fix=fix)
    return spec
