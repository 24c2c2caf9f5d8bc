"""Streams, graphs, compilers and what else runs: decode attention obeys the rules of every call."""

from __future__ import annotations

import gc
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import decode_arena as arena
import decode_cases as cases
import decode_turns
import pytest
import torch
from decode_cases import SIMPLE, SINGLE, Shape
from processes import run
from watched import CYCLES, behind_a_kernel, no_synchronization, operator_called

import warploom
from warploom.errors import DeviceError, ProblemError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
SHAPE = Shape(3, 2, 4, 2, 2000)
COUNTED = [name for name, kernel in SIMPLE.items() if cases.of(kernel).lengths]


def make(name: str, seed: int = 0, **told: Any) -> arena.Call:
    return arena.call(SIMPLE[name], cases.fitting(SIMPLE[name], SHAPE), seed=seed, **told)


def captured(made: arena.Call) -> tuple[torch.cuda.CUDAGraph, arena.Pair]:
    made.run()
    torch.cuda.synchronize()
    gc.collect()  # or another test's graph may die, and be reset, during this capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made.run()
    return graph, found


@pytest.mark.parametrize("name", COUNTED)
def test_one_graph_serves_all_lengths_and_tables(name: str) -> None:
    """Captured where each sequence has one key, replayed at none, some and all."""
    made = make(name, lengths=[1, 1, 1])
    graph, found = captured(made)
    for index, lengths in enumerate(([2000, 2000, 2000], [0, 1, 1999], [64, 0, 65], [0, 0, 0])):
        seed = 3 * index  # whose scales have one shape
        other = make(name, seed=seed, lengths=lengths, heads_first=_heads_first(made))
        for one, new in zip((made.q, made.k, made.v), (other.q, other.k, other.v), strict=True):
            one.room.copy_(new.room)
        for key, tensor in other.keywords.items():
            if isinstance(tensor, torch.Tensor):
                made.keywords[key].copy_(tensor)
        made.used = other.used
        made.out.room.fill_(-1)
        graph.replay()
        arena.assert_right(made, found)
        assert made.out.untouched_outside()


def _heads_first(made: arena.Call) -> bool:
    """Whether the cache lies with heads before rows."""
    return made.k.view.stride(1) > made.k.view.stride(2)


def test_a_graph_of_packed_sequences_serves_all_offsets() -> None:
    made = make("packed", lengths=[2000, 2000, 2000])
    graph, found = captured(made)
    total = len(made.k.view)
    for ends in ((0, 1, 2, 3), (0, 2000, 2000, 4000), (0, 0, 0, total), (0, 64, 1000, 3000)):
        steps = [min(b - a, 2000) for a, b in itertools.pairwise(ends)]
        told = list(itertools.accumulate(steps, initial=0))
        made.keywords["cu_seqlens_k"].copy_(torch.tensor(told, dtype=torch.int32))
        graph.replay()
        arena.assert_right(made, found)


def test_a_first_call_during_capture_is_refused() -> None:
    of = cases.operation(dim=64, softcap=True, page=32)
    made = arena.call(cases.spec(of, rows=32, keys=64, warps=4, stages=2), SHAPE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(DeviceError, match="capturing"):
        made.run()
    arena.verify(made)


@pytest.mark.parametrize("name", SIMPLE)
def test_streams_and_graphs_share_neither_counts_nor_parts(name: str) -> None:
    calls = [make(name, seed) for seed in range(4)]
    wanted = [arena.bits(made) for made in calls]
    graph, replayed = captured(calls[3])
    streams = [torch.cuda.Stream() for _ in range(3)]
    found: list[arena.Pair] = []
    for _ in range(50):
        found = []
        for stream, made in zip(streams, calls, strict=False):
            with torch.cuda.stream(stream):
                found.append(made.run())
        graph.replay()
    torch.cuda.synchronize()
    for pair, expected in zip((*found, replayed), wanted, strict=True):
        assert all(map(arena.same_bits, pair, expected))
    for made, pair in zip(calls, wanted, strict=True):
        arena.assert_right(made, pair)


@pytest.mark.parametrize("name", SIMPLE)
def test_a_result_waits_for_what_its_stream_does_before(name: str) -> None:
    """For keys, lengths and tables that a kernel before has just written, as append does."""
    made = make(name)
    wanted = arena.bits(made)
    sources = [one.clone() for one in made.rooms()]
    stream = torch.cuda.Stream()
    for one in made.rooms():
        one.zero_()
    made.run()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        for one, source in zip(made.rooms(), sources, strict=True):
            one.copy_(source)
        after = arena.bits(made)
    stream.synchronize()
    assert all(map(arena.same_bits, after, wanted))


@pytest.mark.parametrize("name", ["plain", "small", "invariant"])
def test_launches_one_after_the_other_see_each_others_results(name: str) -> None:
    """Kernels may start early, under the last blocks of the one before: they must still wait."""
    made = arena.call(SIMPLE[name], Shape(3, 2, 4, 1, 3000))
    q, k, v = made.tensors
    keywords = {**made.keywords, "spec": made.spec, "scale": 4.0}  # results of results are small
    chain = [torch.empty_like(q) for _ in range(8)]
    expected = [q]
    for _ in chain:
        expected.append(warploom.attention_decode(expected[-1], k, v, **keywords).clone())
        torch.cuda.synchronize()
    for _ in range(30):
        for one in chain:
            one.fill_(torch.nan)
        torch.cuda._sleep(CYCLES // 50)
        for before, after in itertools.pairwise((q, *chain)):
            warploom.attention_decode(before, k, v, out=after, **keywords)
        assert all(map(torch.equal, chain, expected[1:]))


@pytest.mark.parametrize("name", ["plain", "pages"])
def test_a_launch_sees_keys_that_the_kernel_before_wrote(name: str) -> None:
    """A cache of a token more each step: written by a kernel, and read by the next launch."""
    made = make(name, lengths=[2000, 1000, 500], heads_first=False)
    q, k, v = made.tensors
    lengths = made.keywords["cache_seqlens"]
    keywords = {**made.keywords, "spec": made.spec}
    full = [arena.bits(made)[0]]
    source = [one.clone() for one in (k, v)]
    for _ in range(30):
        for one in (k, v):
            one.fill_(1.0)
        lengths.fill_(7)
        warploom.attention_decode(q, k, v, **keywords)
        for one, whole in zip((k, v), source, strict=True):
            torch.add(whole, 0, out=one)
        lengths.copy_(torch.tensor([2000, 1000, 500], device=arena.DEVICE))
        assert torch.equal(warploom.attention_decode(q, k, v, **keywords), full[0])


def test_no_call_waits_for_the_gpu() -> None:
    calls = [make(name) for name in SIMPLE]
    wanted = [arena.bits(made) for made in calls]
    with no_synchronization():
        for made in calls:
            made.run()
    results = behind_a_kernel(lambda: [made.run() for made in calls])
    for pair, expected in zip(results, wanted, strict=True):
        assert all(map(arena.same_bits, pair, expected))


def test_a_plan_is_made_once_for_all_lengths_tables_and_contents() -> None:
    calls = [make("pages", seed, heads_first=False) for seed in range(4)]
    calls[0].run()
    before = warploom.counters.as_dict()
    for made in calls * 2:
        made.keywords["scale"] = 0.1
        arena.verify(made)
    after = warploom.counters.as_dict()
    assert (after["plans"], after["copies"]) == (before["plans"], before["copies"])
    assert after["launches"] == before["launches"] + 8


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_torch_compile_takes_it_without_a_graph_break(backend: str) -> None:
    torch._dynamo.reset()
    made = arena.call(None, Shape(3, 2, 4, 1, 2000), of=SINGLE["page 16"])
    _, k, v = made.tensors

    def layer(q: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = {**made.keywords, "cache_seqlens": lengths}
        out, lse = warploom.attention_decode(q * 2, k, v, return_lse=True, **given)
        return out + 1, lse * 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        for q in (made.q.view, -made.q.view):
            found = compiled(q, made.keywords["cache_seqlens"])
            wanted = layer(q, made.keywords["cache_seqlens"])
            torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)


def test_the_graphs_of_torch_compile_replay_at_other_lengths() -> None:
    torch._dynamo.reset()
    made = arena.call(None, Shape(3, 2, 4, 1, 2000), of=SINGLE["plain"], lengths=[1, 1, 1])
    q, k, v = made.tensors
    k.normal_()
    v.normal_()

    def layer(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return warploom.attention_decode(q + 0, k, v, cache_seqlens=lengths) * 1

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for step in range(6):
            lengths = made.keywords["cache_seqlens"].fill_(1 + 399 * step)
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(q, lengths).clone(), layer(q, lengths))


def test_torch_finds_no_fault_with_the_operator() -> None:
    made = arena.call(None, Shape(3, 2, 4, 1, 200), of=SINGLE["plain"])
    call = operator_called(lambda: warploom.attention_decode(*made.tensors, **made.keywords))
    torch.library.opcheck(*call)


def test_tensors_that_require_grad_are_refused_and_launch_nothing() -> None:
    made = make("plain")
    made.run()
    q = made.q.view.clone().requires_grad_()
    launches = warploom.counters.launches
    with pytest.raises(ProblemError, match="no gradient"):
        warploom.attention_decode(q, *made.tensors[1:], **made.keywords)
    assert warploom.counters.launches == launches


def test_attention_takes_this_way_where_rows_are_few() -> None:
    """What `warploom.attention` makes of few rows by many keys is what decoding makes of them."""
    made = arena.call(None, Shape(2, 2, 4, 2, 8000), of=SINGLE["causal"], lengths=[8000] * 2)
    q, k, v = made.tensors
    found, lse = warploom.attention(q, k, v, causal="bottom_right", return_lse=True)
    arena.assert_right(made, (found, lse))
    told = warploom.explain(warploom.attention, q, k, v, causal="bottom_right")
    assert told.kernel.startswith("attention_decode")


def test_no_stage_is_overwritten_while_processes_take_turns_on_the_gpu() -> None:
    """The arrival that gave a stage back was issued while the stage's last read was under way."""
    with ThreadPoolExecutor(10) as pool:
        command = (sys.executable, decode_turns.__file__)
        done = [*pool.map(lambda seed: run(*command, str(seed)), range(10))]
    assert [(one.stdout.strip(), one.stderr[-500:] * bool(one.returncode)) for one in done] == [
        ("0", "")
    ] * 10
