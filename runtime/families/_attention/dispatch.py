"""Which kernel an attention gets: the spec that was given, what was tuned, else a table's schedule.

decision.py weighs records and model; what is chosen without them stands in measured tables, one for
each pass, in configs/. No shape is decided by a branch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any, Literal, cast

import yaml

from warploom.errors import ProblemError, SpecificationError
from warploom.generator import limits, names
from warploom.generator.families import family
from warploom.generator.families._attention import UNBOUNDED, AttentionShape
from warploom.generator.families.attention_backward import AttentionBackwardOperation, suits
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.specification import KernelSpec, Schedule
from warploom.runtime.decision import Choice, decide
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.problem import Extents

Family = Literal["attention_forward", "attention_backward"]
Operation = AttentionOperation | AttentionBackwardOperation

_MASKS = ("none", "causal", "window")  # each can compute those before it


@cache
def table(name: Family = "attention_forward") -> tuple[dict[str, Any], ...]:
    """The classes of a family's table, as they stand in the file."""
    text = resources.files("warploom.configs").joinpath(name, "schedules.yaml").read_text()
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


def backward_operation(
    element: str, sizes: Extents, band: Band, *, softcap: bool, deterministic: bool
) -> AttentionBackwardOperation:
    """The operation that computes the gradients of a call with the least work."""
    return AttentionBackwardOperation(
        element=element,  # type: ignore[arg-type]
        dim=sizes.kernel_dim,  # type: ignore[arg-type,unused-ignore]
        mask=band.mask,
        softcap=softcap,
        lengths="packed" if sizes.packed else "fixed",
        deterministic=deterministic,
    )


def choose(
    wanted: Operation,
    sizes: Extents,
    spec: KernelSpec | None,
    band: Band | None = None,
    device: DeviceLimits | None = None,
) -> Choice:
    """Return the kernel for an operation at these lengths, with this mask, on a GPU.

    Raises ProblemError for an operation that is not legal, and for a given `spec` that computes
    another one.
    """
    described = family(wanted.family)
    if reasons := described.operation_reasons(wanted):
        value, _, rule = reasons[0].partition(": ")
        raise ProblemError(value, rule=rule, fix="leave out what is not supported")
    if spec is not None:
        return Choice(_checked(spec, wanted), "the spec that was given")
    device = device or NO_GPU
    arch = device.arch
    return decide(
        wanted,
        shape(sizes, band or Band()),
        device,
        default=lambda: untuned(wanted, sizes, arch),
        legal=lambda schedule: fitting(wanted, schedule, sizes.sharing, arch),
        portfolio=lambda: _portfolio(wanted, sizes.sharing, arch),
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


def untuned(wanted: Operation, sizes: Extents, arch: str) -> Choice:
    """Return the table's choice for a legal operation: what there is without tuning."""
    described = family(wanted.family)
    refusal: SpecificationError | None = None
    row = _class(wanted, sizes)
    for fields in row["schedules"]:
        try:
            schedule = described.complete(arch, wanted, fields)
            found = KernelSpec(arch, wanted, schedule)
        except SpecificationError as error:
            refusal = error
            continue
        low, high = row["seq"]
        return Choice(found, f"first of its class in the table, sequences {_lengths(low, high)}")
    raise cast("SpecificationError", refusal)


def fitting(wanted: Operation, schedule: Schedule, sharing: int, arch: str) -> KernelSpec | None:
    """Return the kernel of a schedule where `sharing` query heads have one kv head.

    None where it is not legal, and where it does not suit so many.
    """
    if not suits(schedule, sharing):
        return None
    try:
        return KernelSpec(arch, wanted, schedule)
    except SpecificationError:
        return None


def _portfolio(wanted: Operation, sharing: int, arch: str) -> Iterator[KernelSpec]:
    """Every schedule of the table that an operation can have: what the model may choose from."""
    described = family(wanted.family)
    for row in table(wanted.family):
        if row["dim"] == wanted.dim:
            for fields in row["schedules"]:
                found = fitting(wanted, described.complete(arch, wanted, fields), sharing, arch)
                if found:
                    yield found


def _class(wanted: Operation, sizes: Extents) -> dict[str, Any]:
    """The first class that the operation, the longer of its lengths and its heads are in."""
    length = min(max(sizes.seq_q, sizes.seq_k), limits.LARGEST)  # launches refuse more
    sharing = min(sizes.sharing, limits.LARGEST)
    deterministic = isinstance(wanted, AttentionBackwardOperation) and wanted.deterministic
    return next(
        row
        for row in table(wanted.family)
        if row["dim"] == wanted.dim
        and wanted.mask in row.get("masks", _MASKS)
        and wanted.lengths in row.get("lengths", (wanted.lengths,))
        and deterministic == row.get("deterministic", deterministic)
        and _within(length, row["seq"])
        and _within(sharing, row.get("sharing", (sharing, sharing)))
    )


def _lengths(low: int, high: int) -> str:
    """A class's range of lengths, in words; the largest there can be is no bound."""
    if high >= UNBOUNDED:
        return f"of {low} or more" if low else "of any length"
    return f"of {low} to {high}" if low else f"of up to {high}"


def _within(number: int, inclusive: Sequence[int]) -> bool:
    low, high = inclusive
    return low <= number <= high


def _checked(spec: KernelSpec, wanted: Operation) -> KernelSpec:
    """A wider mask or head dimension computes the same: its bounds and its zeros are run-time.

    So does a deterministic kernel where none is asked for.
    """
    found = spec.operation
    if not (
        isinstance(found, AttentionOperation | AttentionBackwardOperation)
        and found.family == wanted.family
        and found.dim >= wanted.dim
        and _MASKS.index(found.mask) >= _MASKS.index(wanted.mask)
        and _widened(wanted, found) == found
    ):
        raise ProblemError(
            f"spec {spec.name}",
            rule=f"computes another operation; this call needs {names.full(wanted)}",
            fix="leave spec out, or pass one of this operation",
        )
    return spec


def _widened(wanted: Operation, found: Operation) -> Operation:
    """What is wanted, with what another operation may have wider."""
    wider = replace(wanted, dim=found.dim, mask=found.mask)
    if isinstance(wider, AttentionBackwardOperation) and not wider.deterministic:
        wider = replace(
            wider, deterministic=cast("AttentionBackwardOperation", found).deterministic
        )
    return wider
