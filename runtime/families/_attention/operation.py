"""The fields of operations that a call decides, and its shape: what its kernel is chosen by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from warploom.generator.families._attention import UNBOUNDED, AttentionShape
from warploom.generator.families._attention.operation import Operation
from warploom.runtime.families._attention.extents import Extents
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers.modifier import Fields, Modifier
from warploom.runtime.families._attention.problem import Arguments

OperationT = TypeVar("OperationT", bound=Operation)


def fields_of(modifiers: Iterable[Modifier], call: Arguments) -> Fields:
    """The fields of an operation that a call's modifiers decide."""
    return {name: value for one in modifiers for name, value in one.fields(call).items()}


def gradient_fields(
    modifiers: Iterable[Modifier], fields: Fields, wanted: tuple[str, ...]
) -> Fields:
    """The fields of the operation of gradients, of those of a call, `wanted` tensors' too."""
    for one in modifiers:
        fields = one.gradient_fields(fields, wanted)
    return fields


def operation(
    kind: type[OperationT], element: str, sizes: Extents, band: Band, fields: Fields
) -> OperationT:
    """The operation of this kind that computes a call with the least work, with further fields."""
    return kind(
        element=element,  # type: ignore[arg-type]
        dim=sizes.kernel_dim,  # type: ignore[arg-type,unused-ignore]
        mask=band.mask,
        lengths="packed" if sizes.packed else "fixed",
        **fields,
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
