"""Operands of attention in 8 bits: the function that users call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.arguments import require_boolean
from warploom.generator.families.attention_quantize.schedule import TILE
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.attention_forward.values import by_keys
from warploom.runtime.families.attention_quantize.call import AttentionQuantizeCall
from warploom.runtime.families.attention_quantize.reference import Results
from warploom.runtime.function import Function
from warploom.runtime.tensors import lowered

_quantize: Function[Results] = Function("attention_quantize", AttentionQuantizeCall)


class QuantizedAttention(NamedTuple):
    """The operands of attention in 8 bits, with what scores and values are multiplied by.

    q            int8 or e4m3 [batch, heads, seq_q, dim], with the order of strides of q
    k            int8 or e4m3 [batch, kv_heads, seq_k, dim], less its mean where it is smoothed
    v            e4m3 [batch, kv_heads, dim, seq_k to the next multiple of 128], zeros past the last
                 key; in each 16 keys, slot 4 t + u has key u // 2 * 8 + 2 t + u % 2
    q_descale    fp32 [batch, heads, seq_q]: q is about q_descale times these numbers
    k_descale    fp32 [batch, kv_heads, ceil(seq_k / 128)]
    v_descale    fp32 [batch, kv_heads]
    k_mean       fp32 [batch, kv_heads, dim]; None where k is not smoothed
    score_shift  fp32 [batch, heads, seq_q]: dot products of rows of q and the mean. The log-sum-exp
                 of q and k is that of these operands plus the scale of scores times this. None
                 where k is not smoothed
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    k_mean: torch.Tensor | None
    score_shift: torch.Tensor | None


def attention_quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scores: str = "int8",
    smooth: bool = True,
    spec: KernelSpec | str | None = None,
) -> QuantizedAttention:
    """Quantize q, k and v of attention to 8 bits, as attention in 8 bits reads them.

    Args:
        q: [batch, heads, seq_q, dim], fp16 or bf16: any view with a contiguous last dimension.
        k: [batch, kv_heads, seq_k, dim], of the type of q. heads is a multiple of kv_heads, dim a
            multiple of 32 up to 256.
        v: Of the shape of k.
        scores: The type of the quantized q and k: "int8", the more exact one, or "e4m3".
        smooth: Subtract the mean of k over its keys before k is quantized. The softmax is the same;
            log-sum-exps are corrected by `score_shift`. Not for attention with a softcap or with
            sinks, which depend on whole scores.
        spec: The kernel to run, or its name.

    Returns:
        The operands with their scales: of each row of q, of each 128 keys of k, of each head of v.
        v is e4m3 and transposed.

    A scale is the inverse of (127 of int8, 448 of e4m3, over the largest magnitude), each rounded
    to fp32; it is 1 where that magnitude is 0. Values that are not finite are NaN in e4m3, with a
    scale of 1; in int8 their scale is NaN. A mean that is not finite makes all keys of its head so.

    Two launches, on the current stream without waiting; the bits are the same in every run, and on
    every GPU. On CPU tensors the reference rounds alike.

    Raises:
        ProblemError: Before anything is launched; also for tensors that require grad.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 128, 64).bfloat16() for _ in range(3))
        >>> warploom.attention_quantize(q, k, v).q.dtype
        torch.int8
    """
    if smooth is not True and smooth is not False:
        require_boolean("smooth", smooth)
    if torch._C._is_any_autocast_enabled():
        q, k, v = lowered(q), lowered(k), lowered(v)
    return QuantizedAttention(*_quantize(v, q, k, scores, smooth, spec, None))  # type: ignore[arg-type]


def dequantize(
    quantized: QuantizedAttention, keys: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what quantized q, k and v stand for; k less its mean, where it is smoothed.

    Args:
        quantized: What `attention_quantize` returned.
        keys: seq_k, of which v has the next multiple of 128.
        dtype: Of the results.
    """
    q = quantized.q.float() * quantized.q_descale[..., None]
    each = quantized.k_descale.repeat_interleave(TILE, 2)[:, :, :keys, None]
    v = by_keys(quantized.v, keys).float() * quantized.v_descale[..., None, None]
    return q.to(dtype), (quantized.k.float() * each).to(dtype), v.to(dtype)


def transpose_values(
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    *,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Transpose e4m3 v as attention in 8 bits reads it, in one launch.

    Args:
        v: [batch, kv_heads, seq_k, dim], e4m3: any view with a contiguous last dimension; with
            cu_seqlens [total, kv_heads, dim]. dim is a multiple of 16.
        cu_seqlens: int32 [sequences + 1], where packed sequences begin, and the end. The host does
            not read them; rows past the end are those of no sequence.
        spec: The kernel to run, or its name.

    Returns:
        `v` of QuantizedAttention, with the same numbers; packed [kv_heads, dim, keys], where
        sequence i begins at cu_seqlens[i] + 127 i, rounded down to a multiple of 128.

    Raises:
        ProblemError: Before anything is launched; also for a tensor that requires grad.
    """
    return _quantize(v, None, None, "int8", False, spec, cu_seqlens)[2]
