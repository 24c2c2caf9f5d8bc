"""Memory, streams, graphs and compilers of calls on a GPU."""

from __future__ import annotations

import pytest
import route_cases as cases
import torch
from rooms import assert_repeats

import warploom
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


def same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(one, held) for one, held in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kernel", cases.SMOKE, ids=cases.short)
def test_results_have_the_same_bits_in_every_run(kernel: KernelSpec) -> None:
    made = cases.made(kernel, cases.drawn("skipping", 3001, 5, 60), 60)
    wanted = [one.clone() for one in made.verify()]
    assert_repeats(made.run, wanted, made.guarded, runs=100)


def test_a_call_runs_on_the_current_stream_behind_what_is_there() -> None:
    ids = cases.drawn("uniform", 4096, 8, 128)
    wanted, held = warploom.route(ids, 128), torch.zeros_like(ids)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        held.copy_(ids)
        found = warploom.route(held, 128)
    torch.cuda.current_stream().wait_stream(stream)
    assert same(found, wanted)


def test_one_graph_serves_every_routing() -> None:
    ids = cases.drawn("uniform", 2048, 8, 128)
    warploom.route(ids, 128)  # planned
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = warploom.route(ids, 128)
    for kind in cases.KINDS:
        ids.copy_(cases.drawn(kind, 2048, 8, 128, seed=7))
        graph.replay()
        assert same(found, warploom.route(ids, 128))


def test_a_warm_call_plans_and_copies_nothing() -> None:
    ids = cases.drawn("uniform", 64, 8, 128)
    warploom.route(ids, 128)
    before = warploom.counters.as_dict()
    warploom.route(ids, 128)
    after = warploom.counters.as_dict()
    assert after.pop("launches") - before.pop("launches") == 1
    assert after == before


def test_compiled_code_calls_the_operator() -> None:
    compiled = torch.compile(lambda ids: warploom.route(ids, 16), fullgraph=True)
    ids = cases.drawn("skipping", 300, 4, 16)
    assert same(compiled(ids), warploom.route(ids, 16))


def test_nothing_is_launched_for_no_tokens() -> None:
    before = warploom.counters.launches
    offsets, order, _ = warploom.route(torch.zeros(0, 8, dtype=torch.int64, device="cuda"), 4)
    assert offsets.tolist() == [0] * 4 and order.shape == (0,)
    assert warploom.counters.launches == before
