"""Decode attention by FlashInfer's kernels on pages: of CUDA cores, of tensor cores, and XQA.

FlashInfer plans on the host, outside of what is timed. It has its modules built or builds them with
nvcc at a first call (never where FLASHINFER_DISABLE_JIT is set).
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch

from benchmarks.peers._decode_problem import Call, Decode, Given
from warploom.runtime.elements import TORCH

_WORKSPACE = 512 << 20  # bytes: XQA's, and the least of the others (128 MiB are recommended)
_BATCH = 64  # of XQA: where it was seen to run


def cuda_cores(given: Given, page: int) -> Call:
    """The decode kernel, of one row a sequence."""
    if given.problem.rows > 1:
        raise ValueError("FlashInfer's decode kernel has no causal mask")
    return _decode(given, page, tensor_cores=False)


def tensor_cores(given: Given, page: int) -> Call:
    """The prefill kernel; of several rows with a causal mask."""
    return (
        _decode(given, page, tensor_cores=True)
        if given.problem.rows == 1
        else _prefill(given, page)
    )


def _decode(given: Given, page: int, *, tensor_cores: bool) -> Call:
    problem, (first, indices, last) = given.problem, _pages(given, page)
    wrapper = _flashinfer().BatchDecodeWithPagedKVCacheWrapper(
        _workspace(workspace_bytes(given.problem), given.device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=first.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
        backend="fa2" if tensor_cores else "auto",
    )
    wrapper.plan(
        *(first, indices, last, problem.heads, problem.kv_heads, problem.dim, page),
        **_types(given),
    )
    return _runs(given, page, wrapper)


def _prefill(given: Given, page: int) -> Call:
    problem, (first, indices, last) = given.problem, _pages(given, page)
    rows = torch.arange(problem.batch + 1, device=given.device).int() * problem.rows
    wrapper = _flashinfer().BatchPrefillWithPagedKVCacheWrapper(
        _workspace(workspace_bytes(given.problem), given.device),
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=rows.clone(),
        paged_kv_indptr_buf=first.clone(),
        paged_kv_indices_buf=indices.clone(),
        paged_kv_last_page_len_buf=last.clone(),
        backend="fa2",
    )
    wrapper.plan(
        *(rows, first, indices, last, problem.heads, problem.kv_heads, problem.dim, page),
        causal=True,
        **_types(given),
    )
    return _runs(given, page, wrapper)


def _runs(given: Given, page: int, wrapper: Any) -> Call:  # noqa: ANN401 (no dependency)
    caches = given.caches(page)
    q = given.q.flatten(0, 1)
    scales = {}
    if given.cache == "e4m3":
        scales = {"k_scale": float(given.scales[0]), "v_scale": float(given.scales[1])}

    def call(index: int) -> torch.Tensor:
        found: torch.Tensor = wrapper.run(q, caches[index], **scales)
        return found.view(given.q.shape)

    return call


def _types(given: Given) -> dict[str, Any]:
    kinds = {"q_data_type": given.q.dtype, "kv_data_type": TORCH[given.cache]}
    return {**kinds, "sm_scale": given.problem.dim**-0.5}


def _pages(given: Given, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each sequence's pages begin, all pages in order, and how full each last one is."""
    batch, count = given.problem.batch, given.problem.keys // page
    first = torch.arange(batch + 1, device=given.device).int() * count
    return first, given.table(page).reshape(-1), torch.full_like(first[1:], page)


def xqa(given: Given, page: int) -> Call:
    """TensorRT-LLM's XQA as FlashInfer has it; of e4m3 it multiplies e4m3."""
    problem = given.problem
    if problem.batch > _BATCH:
        raise ValueError(f"XQA: measured up to batch {_BATCH}")
    if problem.rows > 1 and page != 64:
        raise ValueError("XQA: several rows with pages of 64 only here")
    attend = _flashinfer("decode").xqa_batch_decode_with_kv_cache
    caches, room, table = given.caches(page), _zeros(given.device), given.table(page)
    lengths, mask = given.lengths.view(torch.uint32), _causal(given) if problem.rows > 1 else None
    q = given.q.flatten(0, 1)
    k_scale, v_scale = (float(one) for one in given.scales)

    def call(index: int) -> torch.Tensor:
        out = torch.empty_like(given.q)
        attend(
            *(q, caches[index], room, table, lengths, problem.keys),
            bmm1_scale=k_scale * problem.dim**-0.5,
            bmm2_scale=v_scale,
            kv_layout="NHD",
            q_len_per_req=problem.rows,
            mask=mask,
            out=out.flatten(0, 1) if problem.rows == 1 else out,
        )
        return out

    return call


def _causal(given: Given) -> torch.Tensor:
    """Bits of the last rows that each row sees, uint16 [batch, rows, 2]."""
    seen = torch.tensor([(1 << row + 1) - 1 for row in range(given.problem.rows)])
    words = torch.stack([seen, torch.zeros_like(seen)], 1).to(torch.int16)
    return words.repeat(given.problem.batch, 1, 1).to(given.device).view(torch.uint16)


def workspace_bytes(problem: Decode) -> int:
    """Return the size in bytes of the workspace that FlashInfer's plan of `problem` needs.

    A plan for a CUDA graph keeps fp32 partial results, and their log-sum-exp, of every query tile
    that any lengths of this many rows could have: one for each `tile` rows, and one more for each
    further sequence. At batch 256, with 64 heads and 4 rows, that is 1.3 GB.
    """
    rows = problem.batch * problem.rows
    longest = (rows - problem.batch + 1) * problem.group  # one sequence might have all further rows
    tile = 128 if longest > 64 else 64 if longest > 16 else 16  # as the plan chooses it
    tiles = -(-rows * problem.group // tile) + problem.batch - 1
    return max(_WORKSPACE, problem.heads * tiles * tile * (problem.dim + 1) * 4 + 4096)


@lru_cache(maxsize=1)  # all contenders of a shape share one; a larger one takes its place
def _workspace(size: int, device: str) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


@cache
def _zeros(device: str) -> torch.Tensor:
    """XQA counts in it, and leaves zeros behind."""
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


def _flashinfer(module: str = "") -> Any:  # noqa: ANN401
    return import_module(f"flashinfer.{module}" if module else "flashinfer")
