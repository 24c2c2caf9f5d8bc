"""FlashAttention's functions, computed by `warploom.attention`: names, arguments and layouts alike.

As in FlashAttention 2.8: q is [batch, seq, heads, dim], or [total, heads, dim] for those with
`varlen`, whose cu_seqlens (int32 [batch + 1]) say where sequences begin; kv has 2 and qkv has 3 of
them before heads. fp16 or bf16, dim up to 256; heads is a multiple of heads_k. Results have the
layout of q. Every function takes

    dropout_p          the probability that a weight is dropped, by torch's generator: others than
                       FlashAttention drops
    softmax_scale      of the scores; None is dim ** -0.5
    causal             the last query attends to every key, whatever the lengths
    window_size        (left, right) columns beside that diagonal; -1 is no bound
    softcap            scores become softcap tanh(score / softcap); 0.0 or less is none
    alibi_slopes       fp32 [heads] or [batch, heads], without gradient: the scores of query i and
                       key j lose slope |i + seqlen_k - seqlen_q - j|, which softmax_lse is of, too
    deterministic      whether gradients are bit-equal from run to run. False leaves it to
                       torch.are_deterministic_algorithms_enabled()
    return_attn_probs  return (out, softmax_lse, None): softmax_lse is fp32 [batch, heads, seq],
                       packed [heads, total], natural and differentiable; -inf for a query that
                       attends to nothing, for which FlashAttention has +inf. The probabilities,
                       which FlashAttention returns under dropout, never are in memory

Tensors are read where they lie, except that a dim which is no multiple of 8 is padded with zeros
first. Gradients of kv and qkv are one contiguous tensor that the kernel writes; in a compiled graph
and under dropout torch stacks them. On CPU tensors the float reference computes the same. All raise
ProblemError before anything is launched.
"""

from __future__ import annotations

from functools import partial

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.integrations.bounds import Sequences
from warploom.integrations.flash_attn_call import (
    FIXED,
    VARLEN,
    Options,
    Probabilities,
    Window,
    attended,
    packed,
)
from warploom.runtime.tensors import shown

_NONE: Window = (-1, -1)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _NONE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | Probabilities:
    """Attention of q [batch, seq_q, heads, dim] to k and v [batch, seq_k, heads_k, dim]."""
    if return_attn_probs is not True and return_attn_probs is not False:
        require_boolean("return_attn_probs", return_attn_probs)
    arguments = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
    )
    values = (q, k, v, *arguments)
    results = None if torch.compiler.is_dynamo_compiling() else FIXED.again(values)
    if results is None:
        keep = partial(FIXED.keep, values)
        results = attended(Options(*arguments), (q, k, v), keep=keep)
    return (*results, None) if return_attn_probs else results[0]


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _NONE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | Probabilities:
    """Attention of q [batch, seq_q, heads, dim] to kv [batch, seq_k, 2, heads_k, dim]."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    return packed(options, (q, kv), return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _NONE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | Probabilities:
    """Attention within qkv [batch, seq, 3, heads, dim]."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    return packed(options, (qkv,), return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _NONE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor | Probabilities:
    """Attention of q [total_q, heads, dim] to k and v [total_k, heads_k, dim], by sequences."""
    if block_table is not None:
        raise ProblemError(
            f"block_table {shown(block_table)}",
            rule="must be None: keys and values here are not paged",
            fix="gather each sequence's pages into k and v [total_k, heads_k, dim]",
        )
    if return_attn_probs is not True and return_attn_probs is not False:
        require_boolean("return_attn_probs", return_attn_probs)
    arguments = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
    )
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    values = (q, k, v, *lengths, *arguments)
    results = None if torch.compiler.is_dynamo_compiling() else VARLEN.again(values)
    if results is None:
        keep = partial(VARLEN.keep, values)
        results = attended(Options(*arguments), (q, k, v), Sequences(*lengths), keep)
    return (*results, None) if return_attn_probs else results[0]


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _NONE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | Probabilities:
    """Attention of q [total_q, heads, dim] to kv [total_k, 2, heads_k, dim], by sequences."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return packed(options, (q, kv), return_attn_probs, sequences)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _NONE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | Probabilities:
    """Attention within qkv [total, 3, heads, dim], by sequences."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    sequences = Sequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return packed(options, (qkv,), return_attn_probs, sequences)
