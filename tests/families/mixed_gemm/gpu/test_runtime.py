"""Streams, graphs, threads and plans: what a call must and must not do around a launch."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import mixed_arena as arena
import pytest
import torch
from mixed_cases import SIMPLE
from product_arena import fill, guarded
from watched import CYCLES, behind_a_kernel, no_synchronization

import warploom

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
WAYS = ("few", "some", "many", "split", "shared")


@pytest.mark.parametrize("name", WAYS)
def test_a_result_waits_for_what_its_stream_does_before(name: str) -> None:
    made = arena.call(SIMPLE[name], 43, 136, 640)
    source = made.a.view.clone()
    made.a.view.fill_(torch.nan)
    made.run()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        made.a.view.copy_(source)
        made.run()
        after = made.d.view.clone()
    stream.synchronize()
    arena.assert_right(made)
    assert torch.equal(after, made.d.view)


@pytest.mark.parametrize("name", WAYS)
def test_streams_do_not_share_what_a_launch_needs(name: str) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    calls = [arena.call(SIMPLE[name], 43, 1032, 2048, seed=seed) for seed in range(3)]
    expected = [arena.verify(made).clone() for made in calls]
    torch.cuda.synchronize()
    for _ in range(30):
        for stream, made in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                made.run()
    torch.cuda.synchronize()
    for made, right in zip(calls, expected, strict=True):
        assert torch.equal(made.d.view, right)


@pytest.mark.parametrize("name", [*WAYS, "layer"])
def test_a_captured_call_replays_on_new_contents(name: str) -> None:
    made = arena.call(SIMPLE[name], 43, 136, 640)
    odd = guarded(43, 640, torch.bfloat16, odd=True).view
    packed = made.weight.packed

    def run() -> torch.Tensor:
        made.run()
        return warploom.mixed_gemm(odd, packed, epilogue=made.listed, spec=made.spec)

    odd.copy_(made.a.view)
    run()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copied = run()
    for seed in (1, 2, 3):
        fill(made.a.view, torch.Generator("cuda").manual_seed(seed))
        odd.copy_(made.a.view)
        made.d.room.fill_(-1)
        graph.replay()
        arena.assert_right(made)
        assert torch.equal(copied, made.d.view)
        assert made.d.untouched_outside()


def test_a_step_of_layers_in_a_graph_has_the_bits_that_it_has_outside() -> None:
    """As decoding does: products of several weights behind each other, one graph, new contents."""
    chains = [arena.chain(SIMPLE[name], 16, 512, 512, length=6) for name in WAYS if name != "many"]
    for chain in chains:
        chain.run()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for chain in chains:
            chain.run()
    for seed in range(4):
        fill(chains[0].values[0], torch.Generator("cuda").manual_seed(seed))
        for chain in chains[1:]:
            chain.values[0].copy_(chains[0].values[0])
        expected = [[value.clone() for value in chain.run()] for chain in chains]
        graph.replay()
        for chain, right in zip(chains, expected, strict=True):
            assert all(map(torch.equal, chain.values[1:], right))


def test_a_plan_is_made_once_and_reused_for_other_tensors() -> None:
    calls = [arena.call(SIMPLE["few"], 47, 136, 768, seed=seed) for seed in (1, 2, 3)]
    before = warploom.counters.plans
    for made in calls * 2:
        arena.verify(made)
    assert warploom.counters.plans == before + 1


def test_no_call_waits_for_the_gpu() -> None:
    made = arena.call(SIMPLE["layer"], 43, 136, 640)
    made.run()
    fresh = arena.call(SIMPLE["layer"], 37, 144, 384)
    with no_synchronization():
        made.run()
        fresh.run()  # planned here
    behind_a_kernel(made.run)
    arena.assert_right(made)
    arena.assert_right(fresh)


def test_threads_on_streams_of_their_own_do_not_disturb_each_other() -> None:
    calls = [arena.call(SIMPLE["few"], 43, 1032, 2048, seed=seed) for seed in range(4)]
    expected = [arena.verify(made).clone() for made in calls]
    torch.cuda.synchronize()

    def work(index: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            return all(torch.equal(calls[index].run(), expected[index]) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4
