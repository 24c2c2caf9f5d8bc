"""FlashInfer's wrapper on a GPU: every case of the CPU, longer batches, and graphs."""

from __future__ import annotations

from dataclasses import replace

import flashinfer_cases as cases
import pytest
import torch
from flashinfer_cases import CASES, Case

from warploom.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)

pytestmark = pytest.mark.gpu
LENGTHS = (1, 1000, 0, 2047, 333, 64, 16, 4096)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_flashinfers_documentation(name: str) -> None:
    cases.verify(CASES[name], "cuda")


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv", [None, torch.float8_e4m3fn], ids=["same", "e4m3"])
def test_no_page_is_lost_of_longer_sequences(
    layout: str, dim: int, page: int, kv: torch.dtype | None
) -> None:
    case = Case(layout, LENGTHS, heads=16, kv_heads=2, dim=dim, page=page, kv=kv, together=True)
    cases.verify(case, "cuda")


@pytest.mark.parametrize("lists", ["cpu", "cuda"])
def test_a_captured_run_computes_what_was_planned_last(lists: str) -> None:
    """Lengths, pages and their numbers change between replays; nothing else does."""
    sizes = {"indptr": 9, "indices": 600, "last": 8}
    buffers = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes.values()]
    workspace = torch.empty(16, device="cuda")
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    first = Case(lengths=(16,) * 8)
    longest = Case(lengths=LENGTHS)
    q, (k, v) = longest.tensors("cuda")
    first.plan(wrapper, lists)
    wrapper.run(q, (k.nan_to_num(), v.nan_to_num()))  # compiles, and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = wrapper.run(q, (k, v), return_lse=True)
    for case in (longest, Case(lengths=(16, 0, 5, 100, 1, 2, 3, 900)), longest):
        given_q, given = case.tensors("cuda")
        for to, one in zip((k, v), given, strict=True):
            to.fill_(torch.nan)
            to[: len(one)] = one
        q.copy_(given_q)
        case.plan(wrapper, lists)
        graph.replay()
        cases.close(case, found, cases.exact(case, q, (k, v)))


def test_the_bits_of_a_sequence_need_not_depend_on_its_neighbours() -> None:
    alone = Case(lengths=(2047,), planned={"disable_split_kv": True})
    among = replace(alone, lengths=(2047, 1, 4096, 300))
    q, caches = among.tensors("cuda")
    outs = []
    for case in (among, alone):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, device="cuda"))
        indptr, indices, last = among.lists()
        count = len(case.lengths)
        lists = indptr[: count + 1], indices[: int(indptr[count])], last[:count]
        wrapper.plan(*lists, 8, 2, 64, 16, q_data_type=torch.bfloat16, disable_split_kv=True)
        outs.append(wrapper.run(q[:count], caches))
    assert torch.equal(outs[0][:1], outs[1])
