"""What the arguments of a call must be, whatever the contents of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.errors import ProblemError
from warploom.generator.families.attention_quantize.schedule import VALUES
from warploom.runtime.families.attention_quantize.reference import E4M3
from warploom.runtime.operands import refuse_repeated
from warploom.runtime.tensors import shown

if TYPE_CHECKING:
    from warploom.runtime.families.attention_quantize.call import AttentionQuantizeCall

SCORES = {"int8": torch.int8, "e4m3": E4M3}
PACKED_AXES, _AXES = 3, 4


def require_words(call: AttentionQuantizeCall) -> None:
    """Raise ProblemError for q without k, and for scores of an unknown type."""
    if (call.q is None) is not (call.k is None):
        raise ProblemError(
            "q without k" if call.k is None else "k without q",
            rule="must both be there, or v alone",
            fix="pass both of them",
        )
    if call.q is not None and (not isinstance(call.scores, str) or call.scores not in SCORES):
        raise ProblemError(
            f"scores {shown(call.scores)}",
            rule='must be "int8" or "e4m3"',
            fix="use one of them",
        )


def check(call: AttentionQuantizeCall) -> None:
    """Raise ProblemError for tensors that do not fit each other."""
    q, k, v = call.q, call.k, call.v
    if call.cu_seqlens is not None:
        _check_packed(call.cu_seqlens, q, v)
    for name, one in (("q", q), ("k", k), ("v", v)):
        if one is not None and call.cu_seqlens is None and one.dim() != _AXES:
            raise ProblemError(
                f"{name} {list(one.shape)}",
                rule="must be [batch, heads, seq, dim]: varlen sequences are not quantized",
                fix="pad sequences to one length, or quantize each by itself",
            )
    if q is None or k is None:
        if v.dtype != E4M3:
            raise ProblemError(
                f"v {shown(v.dtype)} alone",
                rule=f"must be {E4M3}, which is transposed as it is",
                fix="pass q and k, too, to have all of them quantized",
            )
    else:
        _check_all(q, k, v)
    dim, least = v.shape[-1], VALUES if q is None else 32
    if dim % least or not least <= dim <= 256:
        raise ProblemError(
            f"dim {dim}",
            rule=f"a head dimension must be a multiple of {least} up to 256",
            fix="pad q, k and v with zeros, and pass the scale of the true dimension",
        )
    for name, one in call.written():
        refuse_repeated(name, one)


def _check_packed(cu_seqlens: torch.Tensor, q: torch.Tensor | None, v: torch.Tensor) -> None:
    if q is not None or v.dim() != PACKED_AXES:
        raise ProblemError(
            f"cu_seqlens with v {list(v.shape)}" + ("" if q is None else " and q"),
            rule="is of v alone, [total, kv_heads, dim]: q and k of varlen are not quantized",
            fix="pad sequences to one length, or quantize each by itself",
        )
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or not cu_seqlens.is_contiguous():
        raise ProblemError(
            f"cu_seqlens {list(cu_seqlens.shape)} {shown(cu_seqlens.dtype)}",
            rule="must be int32 [sequences + 1], contiguous",
            fix="a cumulative sum of lengths that begins with 0",
        )


def _check_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float16, torch.bfloat16):
        raise ProblemError(
            f"q {shown(q.dtype)}, k {shown(k.dtype)}, v {shown(v.dtype)}",
            rule="must have one type, float16 or bfloat16",
            fix="convert with .to(torch.bfloat16)",
        )
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ProblemError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            rule="k and v must have one shape, and the batch and dim of q",
            fix="give [batch, heads, seq, dim] tensors; to swap heads and seq, use "
            ".transpose(1, 2)",
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ProblemError(
            f"{heads} heads of q over {kv_heads} of k and v",
            rule="the heads of q must be a multiple of those of k and v",
            fix="consecutive heads of q share one of k and v",
        )
