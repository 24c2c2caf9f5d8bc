"""Which kernel an attention gets: the spec that was given, else the schedule of a measured table.

The table lies in configs/attention_schedules.yaml; no shape is decided by a branch here.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, cast

import yaml

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families.attention_forward import FAMILY, AttentionOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.attention_mask import Band
from warploom.runtime.attention_problem import Extents
from warploom.runtime.dispatch import ARCH, Choice

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


def choose(wanted: AttentionOperation, sizes: Extents, spec: KernelSpec | None) -> Choice:
    """Return the kernel for an operation at these lengths.

    Raises ProblemError for an operation that is not legal, and for a given `spec` that computes
    another one.
    """
    if reasons := FAMILY.operation_reasons(wanted):
        value, _, rule = reasons[0].partition(": ")
        raise ProblemError(value, rule=rule, fix="leave out what is not supported")
    if spec is not None:
        return Choice(_checked(spec, wanted), "the spec that was given")
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
