"""The record that says most of a problem without one: of its own GPU kind, or lent by another.

A record of another kind is as many octaves away as its shape and its kind together: where n and k
are the same, one of m 512 of a kind at 0.5 octaves says as much of m 512 as an own one of m 360.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.generator.gpus import kind
from warploom.generator.model import Constants
from warploom.generator.records import Environment, Record, Records
from warploom.generator.shapes import Shape
from warploom.generator.specification import Operation
from warploom.runtime.records import Known, Lender, lent

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
