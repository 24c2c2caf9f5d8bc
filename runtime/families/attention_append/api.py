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
    """Write new keys and values into caches, in place; return q turned by its positions, or None.

    k and v are [batch, kv_heads, seq, dim], fp16 or bf16, dim a multiple of 16 up to 512; packed
    [tokens, kv_heads, dim] with `cu_seqlens`, int32 [batch + 1], which says where the new tokens of
    each sequence begin. `lengths`, int32 [batch], has the rows of each sequence that are there: new
    ones come behind, at positions lengths + 0, 1, .. A negative length leaves its sequence out.

    Caches are [batch, kv_heads, rows, dim], or [pages, kv_heads, page, dim] with `page_table`,
    int32 [batch, columns], pages of any number of rows: views, so that rows may come before heads
    in memory. They are of the type of k, float8_e4m3fn or int8. What has no place is not written:
    rows past a cache or its table, and pages that there are not.

    `cos` and `sin`, [positions, rotary / 2] of fp32 or the type of k, turn the first `rotary`
    numbers of each row of k, and of `q` [batch, heads, seq_q, dim], by its position: those half of
    them apart, or neighbours if `interleaved`. Positions past the tables take their last row.

    `scale_k` and `scale_v`, fp32: what a cached number is multiplied by when it is read. Given, one
    number or [kv_heads], rows are divided by it; [pages, kv_heads, page], like the caches without
    dim, they are written: the row's largest number over 448 (e4m3) or 127 (int8). What is too large
    becomes the largest of the type. e4m3 without scales has 1.

    `lengths_after`, int32 [batch], is written too: the lengths with the new rows. `out` says where
    q goes, which may be q itself.
    Runs on the current stream without waiting, in one launch. On CPU tensors the reference has the
    same bits. Raises ProblemError before anything is launched; also for tensors that require grad.
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
