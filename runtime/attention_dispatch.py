"""Which kernel an attention gets: the spec that was given, what was tuned, else a table's schedule.

decision.py weighs records and model; what is chosen without them stands in a measured table,
configs/attention_schedules.yaml. No shape is decided by a branch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any, cast

import yaml

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families.attention_forward import (
    FAMILY,
    UNBOUNDED,
    AttentionOperation,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.model.shapes import AttentionShape
from warploom.generator.specification import KernelSpec, Schedule
from warploom.runtime.attention_mask import Band
from warploom.runtime.attention_problem import Extents
from warploom.runtime.decision import Choice, decide
from warploom.runtime.dispatch import ARCH

_MASKS = ("none", "causal", "window")  # each can compute those before it


@cache
def table() -> tuple[dict[str, Any], ...]:
    """The classes of the table, as they stand in the file."""
    text = resources.files("warploom.configs").joinpath("attention_schedules.yaml").read_text()
    return tuple(yaml.safe_load(text)["classes"])


def operation(element: str, sizes: Extents, band: Band, *, softcap: bool) -> AttentionOperation:
    """The operation that computes a call with the least work."""
    return AttentionOperation(
        element=element,  # type: ignore[arg-type]
        dim=sizes.kernel_dim,  # type: ignore[arg-type,unused-ignore]
        mask=band.mask,
        softcap=softcap,
        lengths="packed" if sizes.packed else "fixed",
    )


def choose(
    wanted: AttentionOperation,
    sizes: Extents,
    spec: KernelSpec | None,
    band: Band | None = None,
    device: DeviceLimits | None = None,
) -> Choice:
    """Return the kernel for an operation at these lengths, with this mask, on this GPU.

    Raises ProblemError for an operation that is not legal, and for a given `spec` that computes
    another one.
    """
    if reasons := FAMILY.operation_reasons(wanted):
        value, _, rule = reasons[0].partition(": ")
        raise ProblemError(value, rule=rule, fix="leave out what is not supported")
    if spec is not None:
        return Choice(_checked(spec, wanted), "the spec that was given")
    return decide(
        wanted,
        shape(sizes, band or Band()),
        device or DeviceLimits(multiprocessors=132),
        default=lambda: untuned(wanted, sizes),
        legal=lambda schedule: fitting(wanted, schedule),
        portfolio=lambda: _portfolio(wanted),
    )


def shape(sizes: Extents, band: Band) -> AttentionShape:
    """Return what of a call decides its time."""
    bounds = (band.left, band.right)
    bounded = all(bound < UNBOUNDED for bound in bounds)
    return AttentionShape(
        batch=sizes.batch,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        seq_q=sizes.seq_q,
        seq_k=sizes.seq_k,
        dim=sizes.dim,
        window=max(1, sum(bounds) + 1) if bounded else 0,
        total_q=sizes.total_q if sizes.packed else 0,
        total_k=sizes.total_k if sizes.packed else 0,
    )


def untuned(wanted: AttentionOperation, sizes: Extents) -> Choice:
    """Return the table's choice for a legal operation: what there is without tuning."""
    refusal: SpecificationError | None = None
    row = _class(wanted, sizes)
    for fields in row["schedules"]:
        try:
            schedule = FAMILY.complete(ARCH, wanted, fields)
            found = KernelSpec(ARCH, wanted, schedule)
        except SpecificationError as error:
            refusal = error
            continue
        low, high = row["seq"]
        return Choice(found, f"first of its class in the table, sequences of {low} to {high}")
    raise cast("SpecificationError", refusal)


def fitting(wanted: AttentionOperation, schedule: Schedule) -> KernelSpec | None:
    """Return the kernel of a schedule that was recorded; None where it is not legal."""
    try:
        return KernelSpec(ARCH, wanted, schedule)
    except SpecificationError:
        return None


def _portfolio(wanted: AttentionOperation) -> Iterator[KernelSpec]:
    """Every schedule of the table that an operation can have: what the model may choose from."""
    for row in table():
        if row["dim"] == wanted.dim:
            for fields in row["schedules"]:
                found = fitting(wanted, FAMILY.complete(ARCH, wanted, fields))
                if found:
                    yield found


def _class(wanted: AttentionOperation, sizes: Extents) -> dict[str, Any]:
    length = max(sizes.seq_q, sizes.seq_k)
    return next(
        row
        for row in table()
        if row["dim"] == wanted.dim
        and wanted.mask in row.get("masks", _MASKS)
        and wanted.lengths == row.get("lengths", wanted.lengths)
        and row["seq"][0] <= length <= row["seq"][1]
    )


def _checked(spec: KernelSpec, wanted: AttentionOperation) -> KernelSpec:
    """A wider mask or head dimension computes the same: its bounds and its zeros are run-time."""
    found = spec.operation
    if (
        not isinstance(found, AttentionOperation)
        or (found.element, found.softcap, found.lengths)
        != (wanted.element, wanted.softcap, wanted.lengths)
        or found.dim < wanted.dim
        or _MASKS.index(found.mask) < _MASKS.index(wanted.mask)
    ):
        raise ProblemError(
            f"spec {spec.name}",
            rule=f"computes another operation; this call needs {'_'.join(wanted.tokens)}",
            fix="leave spec out, or pass one of this operation",
        )
    return spec
