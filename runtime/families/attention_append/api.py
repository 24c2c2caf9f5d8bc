"""New keys and values in caches: the function that users call."""

from __future__ import annotations

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families.attention_append.call import WRITTEN, AttentionAppendCall
from warploom.runtime.function import Function

_append = Function("attention_append", AttentionAppendCall, written=WRITTEN)


def append_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    lengths_after: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor | None:
    """Append new keys and values to a KV cache, in place, with RoPE and quantization.

    Args:
        k_cache, v_cache: [batch, kv_heads, rows, dim], or [pages, kv_heads, page, dim] with
            `page_table`; any strides that keep dim contiguous. They have the dtype of k,
            float8_e4m3fn or int8.
        k, v: [batch, kv_heads, seq, dim], fp16 or bf16, dim a multiple of 16 up to 512; varlen
            [tokens, kv_heads, dim] with `cu_seqlens`.
        lengths: int32 [batch], the number of rows that each sequence has already. New rows are
            written at positions lengths, lengths + 1 and so on. A negative length skips its
            sequence.
        page_table: int32 [batch, columns], the pages of each sequence in order.
        cu_seqlens: int32 [batch + 1], where the new tokens of each sequence begin.
        q: [batch, heads, seq_q, dim] or varlen [tokens, heads, dim], rotated like k and returned.
        cos, sin: [positions, rotary / 2], fp32 or the dtype of k: the first `rotary` numbers of
            each row of k and q are rotated by its position. Positions past the tables use the last
            row.
        interleaved: Interleaved RoPE (GPT-J), instead of half-split RoPE (NeoX, Llama).
        scale_k, scale_v: fp32 scales of e4m3 and int8 caches. One number or [kv_heads]: rows are
            divided by it. [pages, kv_heads, page], the caches' shape without dim: they are written,
            as the largest magnitude of the row over 448 (e4m3) or 127 (int8). e4m3 caches without
            scales have scale 1.
        lengths_after: int32 [batch], is written: the lengths with the new rows.
        out: The tensor that the rotated q is written to; it may be q itself.
        spec: The kernel to run, a KernelSpec or its name.

    Returns:
        The rotated q, or None without q.

    Raises:
        ProblemError: For arguments that are not supported and tensors that require a gradient,
            before anything is launched.

    Rows past the end of a cache or of its page table, and rows of invalid pages, are not written.
    Runs on the current stream without waiting, in one launch. On CPU tensors a reference gives the
    same bits.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 2, 4, 128, 64).bfloat16()
        >>> k, v = torch.randn(2, 2, 4, 1, 64).bfloat16()  # a new token of two sequences
        >>> lengths = torch.tensor([5, 90], dtype=torch.int32)
        >>> warploom.append_kv_cache(k_cache, v_cache, k, v, lengths)
        >>> torch.equal(k_cache[0, :, 5], k[0, :, 0])
        True
    """
    (turned,) = _append(
        k_cache,
        v_cache,
        k,
        v,
        lengths,
        page_table,
        cu_seqlens,
        q,
        cos,
        sin,
        interleaved,
        scale_k,
        scale_v,
        lengths_after,
        out,
        spec,
    )
    return turned
