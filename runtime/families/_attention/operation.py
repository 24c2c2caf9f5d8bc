"""What an attention computes, and at what shape: what its kernel is chosen by."""

from __future__ import annotations

from warploom.generator.families._attention import UNBOUNDED, AttentionShape
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.problem import Extents

Operation = AttentionOperation | AttentionBackwardOperation


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
