"""What users call: `warploom.attention_decode`."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch

from warploom.arguments import require_boolean
from warploom.generator.specification import KernelSpec
from warploom.renamed import current
from warploom.runtime.families._attention.problem import Window
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall
from warploom.runtime.function import Function
from warploom.runtime.tensors import lowered

_decode = Function("attention_decode", AttentionDecodeCall, into=True)


class _Older(TypedDict, total=False):
    """Old names of keywords."""

    lengths: torch.Tensor | None
    starts: torch.Tensor | None


class _Keywords(_Older, total=False):
    """What a call may be given beside q, k and v, and `return_lse`, for the overloads."""

    cache_seqlens: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    page_table: torch.Tensor | None
    causal: bool
    window: Window | None
    softcap: float | None
    scale: float | None
    sinks: torch.Tensor | None
    scale_k: torch.Tensor | None
    scale_v: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    batch_invariant: bool
    out: torch.Tensor | None
    spec: KernelSpec | str | None


@overload
def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> torch.Tensor: ...


@overload
def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **keywords: Unpack[_Keywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
    **older: Unpack[_Older],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q k^T) v of few rows of q over a KV cache divided among all SMs.

    Args:
        q: [batch, heads, seq_q, dim], fp16 or bf16, with a contiguous last dimension. heads is a
            multiple of kv_heads; seq_q times heads / kv_heads is at most 256, dim 64, 96, 128 or
            256.
        k, v: Caches, read in place: [batch, kv_heads, seq_k, dim], or pages [pages, kv_heads, page,
            dim] of 16, 32, 64, 128 or 256 keys with a `page_table`. They have the dtype of q, or
            are both float8_e4m3fn or both int8.
        cache_seqlens: int32 [batch] on the device of q: the number of keys of each sequence, with
            those of its rows of q. None: the capacity of the cache.
        cache_leftpad: int32 [batch]: keys before this index are masked, as for batches that are
            padded on the left. Positions do not shift.
        page_table: int32 [batch, pages of a sequence]: key i of a sequence is in page
            page_table[.., i // page]. Entries past its length may be anything.
        causal: The last row attends to all keys of its sequence, the row before to one less.
        window: (left, right), the number of keys on each side of the diagonal that a row attends
            to; the diagonal ends at the last row and key. None is unbounded.
        softcap: Scores become softcap tanh(score / softcap).
        scale: The factor of q k^T, dim ** -0.5 by default.
        sinks: [heads], fp32 or the dtype of q: one more term in the sum of each row, without a
            value.
        scale_k, scale_v: For e4m3 and int8 caches, the fp32 factors of the stored numbers: one, one
            for each KV head, or one for each token and head, with the cache's shape without dim.
        cu_seqlens_q, max_seqlen_q: Varlen queries [total, heads, dim]: sequence i has the rows
            cu_seqlens_q[i] to cu_seqlens_q[i + 1] (int32 [batch + 1]), at most max_seqlen_q.
        cu_seqlens_k: Varlen keys [total, kv_heads, dim], likewise, instead of cache_seqlens.
        max_seqlen_k: An upper bound of the keys of a sequence; the capacity of the cache by
            default.
        batch_invariant: Whether the results of a sequence are bitwise identical whatever else is in
            the batch.
        return_lse: Also return the log-sum-exp of each row's scores.
        out: The tensor that the result is written to.
        spec: The kernel to run, a KernelSpec or its name.
        older: Former names of keywords, which still work: `lengths`, `starts`.

    Returns:
        The result, with the shape of q and its order of strides; with `return_lse` also the natural
        log-sum-exps, fp32 [batch, heads, seq_q], varlen [heads, total]. A fully masked row gives 0,
        and a log-sum-exp of -inf, or that of its sink.

    Raises:
        ProblemError: For arguments that are not supported and tensors that require a gradient,
            before anything is launched.

    Only the kernel reads lengths, tables and scales: one captured graph serves all their values. On
    a GPU, lengths and pages outside the cache are clamped to it, and give meaningless results; on
    CPU tensors, where a reference computes the same, they raise an error. Runs on the current
    stream without waiting.

    Example:
        >>> q = torch.randn(2, 8, 1, 64).bfloat16()  # one new token of two sequences
        >>> k, v = torch.randn(2, 2, 2, 128, 64).bfloat16()  # caches of 128 keys each
        >>> lengths = torch.tensor([5, 90], dtype=torch.int32)
        >>> warploom.attention_decode(q, k, v, cache_seqlens=lengths).shape
        torch.Size([2, 8, 1, 64])
    """
    if older:
        return attention_decode(**current(attention_decode, older, locals()))  # type: ignore[no-any-return]
    if return_lse is not True and return_lse is not False:
        require_boolean("return_lse", return_lse)
    if torch._C._is_any_autocast_enabled():
        q = lowered(q)
    results = _decode(
        q,
        k,
        v,
        cache_seqlens,
        cache_leftpad,
        page_table,
        causal,
        window,
        softcap,
        scale,
        sinks,
        scale_k,
        scale_v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        batch_invariant,
        out,
        spec,
    )
    return results if return_lse else results[0]
