"""Which kernel a call gets: the spec that was given, what was tuned, else the family's table.

In this order: the given spec; the record of this very problem; that of the shape for the operation
that this one is timed as, such as a gate's for its GEMM; the record of the nearest shape of either,
whose times the model carries over; the model alone, where it was held against sweeps and found good
enough; the table. Where the model may decide alone, a record has a say if it is of the same layer,
or near. Where a GPU kind has no records or no model, another kind's are taken. A kernel is chosen
once for each kind of call: plans are kept. decision.py finds and weighs records and model; no shape
is decided by a branch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from warploom.errors import ProblemError, SpecificationError
from warploom.generator import names
from warploom.generator.families import family
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.portfolio import legal, listed
from warploom.generator.records import Record
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation, Schedule, parse_name
from warploom.runtime.bounded import remember
from warploom.runtime.decision import Asked, Choice, carried, modelled, near, recorded
from warploom.runtime.records import environment, known, lent
from warploom.runtime.tensors import shown

_PORTFOLIOS = 256  # kept, of operations; each is built once: it takes milliseconds
_portfolios: dict[object, list[KernelSpec]] = {}
_measured: dict[object, KernelSpec | None] = {}  # of records, each checked once
NEAR = 0.5  # octaves to a record of another layer that has a say beside a model that decides


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
    if reasons := described.operation_faults(operation):
        value, _, rule = reasons[0].partition(": ")
        raise ProblemError(value, rule=rule, fix=described.table.advice)
    if spec is not None:
        return Choice(_checked(spec, operation, requires), "the spec that was given")
    found, here = known(device.gpu), environment(device, operation.family)
    exact = found.records.exact(operation, shape, here)
    choice = recorded(exact, _of_record(exact, operation, shape, device, requires))
    asked = Asked(operation, shape, requires, recorded=choice is not None)
    unread = [*found.unread]
    plainer = described.table.timed_as(operation)
    if choice is None and plainer != operation:
        exact = found.records.exact(plainer, shape, here)
        choice = recorded(exact, _of_record(exact, operation, shape, device, requires))
        if choice is not None:
            choice = replace(choice, reason=f"{choice.reason}, of {names.full(plainer)}")
    if choice is None:
        default = untuned(operation, shape, device, requires)
        within = math.inf if default.seconds is None else NEAR
        nearest = near(found, operation, shape, here, within)
        if nearest is None and plainer != operation:
            nearest = near(found, plainer, shape, here, within)
        specs = _of_record(nearest.record if nearest else None, operation, shape, device, requires)
        choice = carried(nearest, specs, default.spec, shape, here) or default
        unread += [why for one in lent(device.gpu, operation.family) for why in one.unread]
    choice = replace(choice, asked=asked)
    if not unread:
        return choice
    return replace(choice, reason=f"{choice.reason}; not read: {'; '.join(unread)}")


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
    refusal: SpecificationError | None = None
    for row in table.rows(operation, shape):
        try:
            candidate = listed(row, operation, shape, device.arch, requires)
        except SpecificationError as error:
            refusal = error
            continue
        order = table.order(row, candidate.schedule, shape, device, requires)
        if best is None or order < best[0]:
            best = order, candidate
    if best is None:
        raise refusal or SpecificationError(f"no schedule for {operation}")
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
    try:
        spec = KernelSpec.of_legal(*key)
    except SpecificationError:
        spec = None
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
        found = [*legal(operation, shape, device.arch, requires)]
        remember(_portfolios, kind, found, _PORTFOLIOS)
    return (spec for spec in found if table.suits(spec.schedule, shape))


def _of_record(
    record: Record | None,
    operation: Operation,
    shape: Shape,
    device: DeviceLimits,
    requires: object,
) -> Mapping[Schedule, KernelSpec]:
    """The kernels of a record's schedules, of those that this call can have."""
    specs = {}
    for timed in record.contenders if record else ():
        spec = fitting(operation, shape, timed.schedule, device.arch, requires)
        if spec is not None:
            specs[timed.schedule] = spec
    return specs


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
