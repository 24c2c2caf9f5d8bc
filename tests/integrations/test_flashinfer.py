"""FlashInfer's wrapper of batch decode: page tables, layouts, plans, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flashinfer_cases as cases
import pytest
import torch
from flashinfer_cases import CASES, Case

from warploom.errors import ProblemError
from warploom.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)

WORKSPACE = torch.empty(0)


def planned(case: Case, **planned_too: Any) -> BatchDecodeWithPagedKVCacheWrapper:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, case.layout)
    replace(case, planned={**case.planned, **planned_too}).plan(wrapper)
    return wrapper


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_flashinfers_documentation(name: str) -> None:
    """Every page in its place, none too many; log-sum-exps in base 2; NaN where nothing is."""
    cases.verify(CASES[name], "cpu")


def test_a_sequence_without_pages_gives_zeros() -> None:
    """Batches are padded by these up to the size of a captured graph."""
    case = Case(lengths=(0, 5))
    q, cache = case.tensors("cpu")
    out, lse = planned(case).run(q, cache, return_lse=True)
    assert out[0].eq(0).all() and lse[0].eq(-torch.inf).all()
    assert out[1].ne(0).any()


def test_results_go_where_they_are_wanted() -> None:
    case = CASES["scales"]
    q, cache = case.tensors("cpu")
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    found = planned(case).run_return_lse(q, cache, out=out, lse=lse, **case.given)
    assert [one.data_ptr() for one in found] == [out.data_ptr(), lse.data_ptr()]
    wanted = planned(case).run(q, cache, **case.given)
    assert isinstance(wanted, torch.Tensor) and torch.equal(wanted, out)


def test_options_of_plan_may_come_by_position() -> None:
    """As they did in FlashInfer's earlier versions: a wrong order would compute something else."""
    case = CASES["window"]
    q, cache = case.tensors("cpu")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    sizes = (case.heads, case.kv_heads, case.dim, case.page)
    wrapper.plan(*case.lists(), *sizes, "NONE", 20, None, "bfloat16", None, None, None, None)
    cases.close(case, wrapper.run(q, cache, return_lse=True), cases.exact(case, q, cache))


# ---- CUDA graphs ---------------------------------------------------------------------------------


def buffers(batch: int = 6, indices: int = 40) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.int32) for size in (batch + 1, indices, batch)]


def test_plans_for_graphs_keep_their_place() -> None:
    """A graph reads what was planned last: a table at another address would be the old one."""
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers())
    assert wrapper.is_cuda_graph_enabled
    places = set()
    for case in (CASES["NHD"], Case(lengths=(200, 3, 5, 7, 0, 16)), Case(lengths=(16,) * 6)):
        case.plan(wrapper)
        q, cache = case.tensors("cpu")
        cases.close(case, wrapper.run(q, cache, return_lse=True), cases.exact(case, q, cache))
        found = wrapper._pages
        assert found is not None
        places.add((found.table.data_ptr(), found.table.shape, found.lengths.data_ptr()))
    assert len(places) == 1


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (Case(lengths=(16,) * 5), "a plan of 5 sequences, 1 rows each"),
        (Case(lengths=(16,) * 6, rows=2), "a plan of 6 sequences, 2 rows each"),
        (Case(lengths=(41 * 16, *[1] * 5)), "41 pages of one sequence: must be at most 40"),
    ],
    ids=["batch", "rows", "pages"],
)
def test_a_plan_that_graphs_have_no_room_for_is_refused(case: Case, told: str) -> None:
    """Written past the table's end, or left out, it would be another batch's pages."""
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers())
    CASES["NHD"].plan(wrapper)
    with pytest.raises(ProblemError, match=told):
        case.plan(wrapper)
    q, cache = CASES["NHD"].tensors("cpu")
    found = wrapper.run(q, cache, return_lse=True)
    cases.close(CASES["NHD"], found, cases.exact(CASES["NHD"], q, cache))


def test_the_table_of_a_large_batch_is_bounded() -> None:
    """Every sequence may have every page: 4096 of them in a pool of 2^20 would be 17 GB."""
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers(4096, 2**20))
    assert wrapper._fixed is not None
    assert wrapper._fixed.table.numel() <= 2**22


def test_buffers_of_graphs_are_asked_for() -> None:
    with pytest.raises(ProblemError, match="paged_kv_indices_buffer None with use_cuda_graph"):
        BatchDecodeWithPagedKVCacheWrapper(
            WORKSPACE, use_cuda_graph=True, paged_kv_indptr_buffer=torch.zeros(3)
        )
    first, indices, _ = buffers()
    with pytest.raises(ProblemError, match="must be one longer"):
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, first, indices, first)


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode 'ROPE_LLAMA': must be left out"),
        ({"window_right": 3}, "window_right 3: must be left out"),
        ({"o_data_type": "float32"}, "o_data_type 'float32': must be left out"),
        ({"q_data_type": "float8_e4m3fn"}, "q_data_type torch.float8_e4m3fn: must be"),
        ({"q_data_type": "half of it"}, "q_data_type 'half of it': must be a type"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused_by_its_name(asked: dict[str, Any], told: str) -> None:
    case = Case()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(ProblemError, match=told):
        wrapper.plan(*case.lists(), case.heads, case.kv_heads, case.dim, case.page, **asked)


def test_pages_without_a_kernel_are_refused() -> None:
    with pytest.raises(ProblemError, match="page_size 1: must be one of 16, 32, 64, 128, 256"):
        planned(Case(page=1))


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "told"),
    [
        ([1, 2], [0, 1], [1], "must begin with 0"),
        ([0, 3, 2], [0, 1, 2], [1, 1], "not fall"),
        ([0, 3], [0, 1], [1], "end within the indices"),
        ([0, 1, 2], [0, 1], [1], r"last_page_len \[1\]: must be \[2\]"),
    ],
    ids=["begin", "fall", "end", "last"],
)
def test_lists_that_do_not_go_together_are_refused(
    indptr: list[int], indices: list[int], last: list[int], told: str
) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    lists = (torch.tensor(one, dtype=torch.int32) for one in (indptr, indices, last))
    with pytest.raises(ProblemError, match=told):
        wrapper.plan(*lists, 8, 2, 64, 16)


def test_a_call_that_is_not_as_planned_is_refused() -> None:
    """Numbers of another layer's pages would be read from this one's cache."""
    case = Case()
    q, (k, v) = case.tensors("cpu")
    with pytest.raises(ProblemError, match="run before plan"):
        BatchDecodeWithPagedKVCacheWrapper(WORKSPACE).run(q, (k, v))
    wrapper = planned(case)
    for wrong, told in (
        ((q[:3], (k, v)), r"q \[3, 8, 64\]"),
        ((q.half(), (k, v)), r"q .* of torch.float16"),
        ((q, (k.transpose(1, 2), v.transpose(1, 2))), r"paged_kv_cache \[.*\] of"),
        ((q, (k.half(), v.half())), "paged_kv_cache .* of torch.float16"),
        ((q, k), "paged_kv_cache"),
    ):
        with pytest.raises(ProblemError, match=told):
            wrapper.run(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match=r"window_left 5.*must be as planned, -1 and 1"):
        wrapper.run(q, (k, v), window_left=5)
    with pytest.raises(ProblemError, match=r"k_scale <tensor.*must be a finite number"):
        wrapper.run(q, (k, v), k_scale=torch.ones(1))  # type: ignore[arg-type]
