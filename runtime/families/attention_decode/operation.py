"""What a call of `warploom.attention_decode` computes, at what shape, and where its tensors lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.generator.families.attention_decode import (
    DecodeOperation,
    DecodeProblem,
    DecodeShape,
)
from warploom.runtime.elements import name_of
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.operands import Strides, placed, strides
from warploom.runtime.families._attention.problem import Extents as AttentionExtents
from warploom.runtime.families.attention_decode import cache
from warploom.runtime.families.attention_decode.extents import Extents

if TYPE_CHECKING:
    from warploom.runtime.families.attention_decode.call import AttentionDecodeCall


INVARIANT = (64, 4096)  # sequences, and keys of each, that batch_invariant kernels are chosen for


def operation(call: AttentionDecodeCall, sizes: Extents, band: Band) -> DecodeOperation:
    """The operation that computes a call with the least work."""
    plain = call.plain
    return DecodeOperation(
        element=name_of(call.q.dtype, "q"),
        dim=sizes.dim,
        cache="same" if call.k.dtype == call.q.dtype else name_of(call.k.dtype, "k"),
        scales=_scales(call),
        page=sizes.page,
        keys="packed" if sizes.keys == "packed" else "fixed",
        queries="packed" if sizes.packed else "fixed",
        lengths=call.cache_seqlens is not None,
        starts=call.cache_leftpad is not None,
        mask=band.mask,
        batch_invariant=call.batch_invariant,
        **plain.modifier_fields,
    )


def shape(sizes: AttentionExtents, *, batch_invariant: bool = False) -> DecodeShape:
    """Return what of a call decides its time.

    Where results must not depend on the batch, no kernel is chosen by it either, nor by its longest
    sequence: all batches are taken for one.
    """
    batch, seq_k = INVARIANT if batch_invariant else (sizes.batch, sizes.seq_k)
    return DecodeShape(batch, sizes.heads, sizes.kv_heads, sizes.seq_q, seq_k)


def problem(
    call: AttentionDecodeCall,
    sizes: Extents,
    band: Band,
    out: torch.Tensor,
    copies: tuple[str, ...],
) -> DecodeProblem:
    """What a launch is laid out for, of a result that lies as `out` does."""
    packed_keys, table = sizes.keys == "packed", call.page_table
    by_token = _scales(call) == "token"
    return DecodeProblem(
        sizes.batch,
        sizes.heads,
        sizes.kv_heads,
        sizes.seq_q,
        sizes.seq_k,
        entries=1 if packed_keys else sizes.pages if sizes.page else sizes.batch,
        entry_rows=sizes.page or sizes.total_k,
        strides_q=placed("q", call.q, copies, packed=sizes.packed),
        strides_o=strides(out, packed=sizes.packed),
        strides_k=strides(call.k, packed=packed_keys),
        strides_v=strides(call.v, packed=packed_keys),
        total_q=sizes.total_q if sizes.packed else 0,
        table_stride=0 if table is None else table.stride(0),
        strides_scale_k=_steps(call.scale_k, call.k) if by_token else (0, 0, 0),
        strides_scale_v=_steps(call.scale_v, call.k) if by_token else (0, 0, 0),
        head_scale_stride=_steps(call.scale_k, call.k)[1],
        left=band.left,
        right=band.right,
    )


def _scales(call: AttentionDecodeCall) -> str:
    """Scales of k and v as a kernel has them: where they lie apart, as those of tokens."""
    if call.scale_k is None:
        return "none"
    kinds = [cache.kind_of(scale, call.k) for scale in (call.scale_k, call.scale_v)]
    alike = _steps(call.scale_k, call.k) == _steps(call.scale_v, call.k)
    return "head" if alike and "token" not in kinds else "token"


def _steps(scale: torch.Tensor | None, k: torch.Tensor) -> Strides:
    """The strides of a scale over entries, heads and rows of the cache."""
    if scale is None or cache.kind_of(scale, k) == "tensor":
        return (0, 0, 0)
    if scale.dim() == 1:
        return (0, scale.stride(0), 0)
    if scale.dim() == 2:  # of packed keys
        return (0, scale.stride(1), scale.stride(0))
    return (scale.stride(0), scale.stride(1), scale.stride(2))
