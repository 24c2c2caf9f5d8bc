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
    """Return softmax(scale q k^T) v of few rows of q over a long cache, whose keys are split.

    q is [batch, heads, seq_q, dim], fp16 or bf16: any views with a contiguous last dimension.
    heads is a multiple of kv_heads; seq_q times heads / kv_heads is at most 256, dim 64, 96, 128
    or 256. k and v are caches, read where they lie: [batch, kv_heads, seq_k, dim], or pages
    [pages, kv_heads, page, dim] with a page_table, of 16, 32, 64, 128 or 256 keys each. They have
    the type of q, or are both float8_e4m3fn or both int8. The result has the shape of q and its
    order of strides. `scale` is dim ** -0.5 by default.

    cache_seqlens  int32 [batch] on the device of q: how many keys of each sequence count, those
              of its rows of q included. None: all that there is room for
    cache_leftpad  int32 [batch]: no row attends to a key before it, as where batches are padded on
              the left. Positions do not shift
    page_table  int32 [batch, pages of a sequence]: key i of a sequence lies in page
              page_table[.., i // page]. What is past its length may be anything
    causal    the last row attends to all keys of its sequence, the row before to one less
    window    (left, right): a row attends to so many keys on each side of the diagonal, which
              ends at the last row and key; None is no bound
    softcap   scores become softcap tanh(score / softcap)
    sinks     [heads], fp32 or of the type of q: a score more in the sum of each row, of no value
    scale_k, scale_v  of e4m3 and int8 caches, fp32: what numbers in them are times; one, one for
              each kv head, or one for each token and head, indexed as the cache is without dim
    cu_seqlens_q, max_seqlen_q  packed queries [total, heads, dim]: sequence i has the rows
              cu_seqlens_q[i] to cu_seqlens_q[i + 1] (int32 [batch + 1]), at most max_seqlen_q
    cu_seqlens_k  packed keys [total, kv_heads, dim], likewise, instead of cache_seqlens
    max_seqlen_k  no sequence has more keys; by default as many as there is room for
    batch_invariant  a sequence's result does not depend, in any bit, on what it is batched with
    return_lse  also return the log-sum-exp of each row's scores: natural, fp32
              [batch, heads, seq_q], packed [heads, total]
    out, spec   where the result goes, and the kernel to run

    A row that attends to nothing gives 0, and -inf as its log-sum-exp, or its sink. Lengths,
    tables and scales are read by the kernel alone: one captured graph serves all that change. On a
    GPU, lengths and pages that lead out of the cache are kept within it, with results of no
    meaning; on CPU tensors, where the reference computes the same, they are refused. Runs on the
    current stream without waiting. There is no gradient: ProblemError for tensors that require
    one, and for all that cannot be computed, before anything is launched.
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
