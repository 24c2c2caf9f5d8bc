"""Decode attention by torch's backends and by FlashAttention-3, on contiguous keys or pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.peers._decode_problem import Given
from benchmarks.peers._decode_way import Call, Make
from benchmarks.peers._flash import flash3_operators

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def cudnn(given: Given, _page: int) -> Call:
    """cuDNN as torch has it: without a mask."""
    if given.problem.rows > 1:
        raise ValueError("torch's causal mask of cuDNN begins at the top left")
    return _turned(given, _sdpa(CUDNN), given.q)


def flash2(given: Given, _page: int) -> Call:
    """FlashAttention-2 as torch has it; by its operator, whose mask ends at the last row."""
    rows, keys, dim = given.problem.rows, given.problem.keys, given.problem.dim
    if rows == 1:
        return _turned(given, _sdpa(FLASH), given.q)
    caches = given.caches()

    def call(index: int) -> torch.Tensor:
        k, v = caches[index]
        found: torch.Tensor = torch.ops.aten._flash_attention_forward(
            *(given.q, k, v, None, None, rows, keys, 0.0, True, False), scale=dim**-0.5
        )[0]
        return found

    return call


def of_rows(backend: SDPBackend) -> Make:
    """A backend with the heads of a group as rows: each kv head is read by one block of rows."""

    def of(given: Given, _page: int) -> Call:
        problem = given.problem
        if problem.rows > 1:
            raise ValueError("the mask of several rows is not that of a group's heads")
        extents = problem.batch, problem.kv_heads, problem.group, problem.dim
        grouped = given.q.view(extents).transpose(1, 2)
        call = _turned(given, _sdpa(backend), grouped)
        return lambda index: call(index).transpose(1, 2).reshape(given.q.shape)

    return of


def _sdpa(backend: SDPBackend) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([backend]):
            grouped = q.shape[1] != k.shape[1]
            return scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    return attend


def _turned(given: Given, attend: Attend, q: torch.Tensor) -> Call:
    """Tensors as torch has them: [batch, heads, seq, dim], seen transposed."""
    heads_first = [[one.transpose(1, 2) for one in pair] for pair in given.caches()]
    q = q.transpose(1, 2)
    return lambda index: attend(q, *heads_first[index]).transpose(1, 2)


def flash3(given: Given, page: int) -> Call:
    """FlashAttention-3; what it plans from lengths is planned before, as its users do."""
    forward, _ = flash3_operators()
    problem, causal = given.problem, given.problem.rows > 1
    sizes = problem.batch, problem.rows, problem.keys, problem.heads, problem.kv_heads
    planned = torch.ops.flash_attn_3.get_scheduler_metadata(
        *(*sizes, problem.dim, problem.dim, given.q.dtype, given.lengths),
        page_size=page or None,
        is_causal=causal,
        num_splits=0,
    )
    caches, more = given.caches(page), {"page_table": given.table(page)} if page else {}

    def call(index: int) -> torch.Tensor:
        found: torch.Tensor = forward(
            *(given.q, *caches[index]),
            seqused_k=given.lengths,
            softmax_scale=problem.dim**-0.5,
            is_causal=causal,
            scheduler_metadata=planned,
            num_splits=0,
            **more,
        )[0]
        return found

    return call
