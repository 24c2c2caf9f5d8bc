"""`flash_attn_with_kvcache` on a GPU: every case of the CPU, longer caches, graphs, and no copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flash_attn_cache_cases as cases
import pytest
import torch
from flash_attn_cache_cases import CASES, Case

import warploom
from warploom.flash_attn import flash_attn_with_kvcache

pytestmark = pytest.mark.gpu
LONG: dict[str, dict[str, Any]] = {
    "fixed": {"keys": 1413},
    "pages of 16": {"keys": 1424, "page": 16},
    "pages of 64": {"keys": 1408, "page": 64},
    "pages of 512": {"keys": 1536, "page": 512},
    "indexed": {"keys": 1424, "indexed": True},
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_caches_are_within_their_bounds_of_float64(name: str) -> None:
    cases.verify(CASES[name], "cuda")


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("how", LONG)
def test_no_tile_is_lost_of_longer_caches(how: str, rows: int, dim: int) -> None:
    case = Case((700, 1400, 3, 0), heads=8, heads_k=2, dim=dim, rows=rows, new=rows, rotary=1.0)
    case = replace(case, keywords={"causal": True, "rotary_interleaved": False}, **LONG[how])
    cases.verify(case, "cuda")


@pytest.mark.parametrize("name", ["fixed, rotary", "paged, causal window", "indexed, rotary"])
def test_one_graph_serves_all_lengths(name: str) -> None:
    """What was captured reads lengths, positions and pages where they are, not as they were."""
    case = CASES[name]
    given, eager = case.arguments("cuda"), case.arguments("cuda")
    flash_attn_with_kvcache(**case.arguments("cuda"))  # compiles, and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_attn_with_kvcache(**given)
    for lengths in (case.lengths, (1, 2, 30), (0, 17, 9)):
        for one in (given, eager):
            one["cache_seqlens"].copy_(torch.tensor(lengths))
        graph.replay()
        wanted = flash_attn_with_kvcache(**eager)
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
        assert torch.equal(given["k_cache"].nan_to_num(7), eager["k_cache"].nan_to_num(7))


@pytest.mark.parametrize(
    "name", ["fixed, new", "paged, rotary", "indexed, new", "large pages, new"]
)
def test_nothing_is_copied(name: str) -> None:
    given = CASES[name].arguments("cuda")
    copies = warploom.counters.copies
    flash_attn_with_kvcache(**given)
    assert warploom.counters.copies == copies


def test_a_compiled_step_computes_the_same() -> None:
    torch._dynamo.reset()
    given, eager = (CASES["paged, rotary"].arguments("cuda") for _ in range(2))
    found = torch.compile(flash_attn_with_kvcache, fullgraph=True)(**given)
    assert torch.equal(found, flash_attn_with_kvcache(**eager))
    assert torch.equal(given["k_cache"].nan_to_num(7), eager["k_cache"].nan_to_num(7))
