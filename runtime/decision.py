"""How a kernel is chosen where none was given: by record, by the nearest record, by the model.

In this order: the record of this very problem; the record of the nearest shape of the same
operation, whose times the model carries over; the model alone, where it was held against sweeps and
found good enough; the untuned default. It is asked once for each kind of call: plans are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from warploom.generator.launches import DeviceLimits
from warploom.generator.model import Constants, predict, rank
from warploom.generator.records import Environment, Record
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation, Schedule
from warploom.runtime.records import environment, known

SHOWN = 4  # runners-up that are told
TIE = 0.02  # of predicted time, within which the default stays


@dataclass(frozen=True, slots=True)
class Alternative:
    """A kernel, and the seconds that it took (`recorded`) or should take (`predicted`)."""

    spec: KernelSpec
    seconds: float
    source: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of a problem, why it is this one, and what came next.

    seconds   recorded or predicted, as the reason says; None where neither decided
    """

    spec: KernelSpec
    reason: str
    seconds: float | None = None
    runners_up: tuple[Alternative, ...] = ()


def decide(
    operation: Operation,
    shape: Shape,
    device: DeviceLimits,
    *,
    default: Callable[[], Choice],
    legal: Callable[[Schedule], KernelSpec | None],
    portfolio: Callable[[], Iterable[KernelSpec]],
) -> Choice:
    """Return the kernel for a shape of an operation on `device`.

    `default` is the choice without tuning, `legal` the kernel of a recorded schedule if this call
    can have it, `portfolio` what the model alone may choose from.
    """
    found = known(device.gpu)
    if not found.records and found.constants is None and not found.unread:
        return default()
    here = environment(device, operation.family)
    choice = (
        _recorded(found.records.exact(operation, shape, here), legal)
        or _carried(
            found.records.nearest(operation, shape, here),
            shape,
            here,
            found.constants,
            default,
            legal,
        )
        or _modelled(found.constants, shape, here, portfolio)
        or default()
    )
    if not found.unread:
        return choice
    reason = f"{choice.reason}; not read: {'; '.join(found.unread)}"
    return Choice(choice.spec, reason, choice.seconds, choice.runners_up)


def _recorded(
    record: Record | None, legal: Callable[[Schedule], KernelSpec | None]
) -> Choice | None:
    if record is None:
        return None
    timed = [(legal(one.schedule), one.seconds) for one in record.contenders]
    found = [Alternative(spec, seconds, "recorded") for spec, seconds in timed if spec]
    if not found:
        return None
    told = f"recorded {record.measured[:10]} at this shape"
    if record.speedup is not None:
        told += f", {record.speedup:.3f} times as fast as the default"
    if record.noisy:
        told += ", with unsteady clocks"
    return _first_of(found, told)


def _carried(
    record: Record | None,
    shape: Shape,
    here: Environment,
    constants: Constants | None,
    default: Callable[[], Choice],
    legal: Callable[[Schedule], KernelSpec | None],
) -> Choice | None:
    """The best of the nearest record's contenders and the default, as the model carries them."""
    if record is None:
        return None
    found: list[Alternative] = []
    factors: list[float] = []
    for one in record.contenders:
        spec = legal(one.schedule)
        if spec is None:
            continue
        there = predict(constants, spec, record.shape, record.environment.multiprocessors)
        now = predict(constants, spec, shape, here.multiprocessors)
        factor = now / there if now and there else 1.0
        found.append(Alternative(spec, one.seconds * factor, "predicted"))
        if there:
            factors.append(math.log(one.seconds / there))
    if not found:
        return None
    found.sort(key=lambda one: one.seconds)
    untuned = default().spec
    if factors and untuned not in [one.spec for one in found]:
        seconds = predict(constants, untuned, shape, here.multiprocessors)
        if seconds:
            usual = seconds * math.exp(sum(factors) / len(factors))
            found.append(Alternative(untuned, usual, "predicted"))
    found.sort(key=lambda one: one.seconds * ((1 - TIE) if one.spec == untuned else 1))
    told = f"nearest record, {record.shape}"
    told += ", carried over by the model" if factors else ", as it is: no model of this GPU"
    if stale := record.environment.differences(here):
        told += f"; stale: {'; '.join(stale)}"
    return _first_of(found, told)


def _modelled(
    constants: Constants | None,
    shape: Shape,
    here: Environment,
    portfolio: Callable[[], Iterable[KernelSpec]],
) -> Choice | None:
    """The model's choice, where it may decide: fitted on this GPU kind and held against sweeps."""
    if constants is None or constants.stand_in:
        return None
    specs = list(dict.fromkeys(portfolio()))
    if not specs:
        return None
    fitted = constants.families.get(specs[0].operation.family)
    if fitted is None or fitted.quality is None or not fitted.quality.decides:
        return None
    ranked = rank(constants, specs, shape, here.multiprocessors)
    found = [Alternative(one.spec, one.seconds, "predicted") for one in ranked]
    return _first_of(found, "the model alone: nothing near was recorded")


def _first_of(found: list[Alternative], reason: str) -> Choice:
    best, *others = found
    return Choice(best.spec, reason, best.seconds, tuple(others[:SHOWN]))
