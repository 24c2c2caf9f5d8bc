"""The fields of operations that a call decides, and its shape: what its kernel is chosen by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from warploom.generator.families._attention import UNBOUNDED, AttentionShape
from warploom.generator.families._attention.operation import Operation
from warploom.runtime.families._attention.extents import Extents
from warploom.runtime.families._attention.further import BIASES
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.problem import Arguments

Fields = Mapping[str, Any]  # of an operation, by name
OperationT = TypeVar("OperationT", bound=Operation)


def of_further(call: Arguments) -> Fields:
    """The fields of an operation that a call's modifiers decide."""
    found: dict[str, Any] = {}
    if call.softcap is not None:
        found["softcap"] = True
    if call.sinks is not None:
        found["sinks"] = "same" if call.sinks.dtype == call.q.dtype else "fp32"
    if call.block_mask is not None:
        found["blocks"] = True
    if call.alibi_slopes is not None:
        found["alibi"] = True
    if call.bias is not None:
        found["bias"] = BIASES[call.bias.dtype]
    if call.mask is not None:
        found["masked"] = True
    if call.dropout_p:
        found["dropout"] = True
    return found


def of_gradients(further: Fields, wanted: tuple[str, ...]) -> Fields:
    """The fields of the operation of gradients, of those of a call, `wanted` further ones too."""
    # Sinks have their share in the log-sum-exp, and are asked for their own gradient alone.
    found = {name: kind for name, kind in further.items() if name != "sinks" or name in wanted}
    return {**found, "bias_gradient": True} if "bias" in wanted else found


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
