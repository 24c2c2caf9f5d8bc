"""Streams, graphs, compilers and what else runs: attention obeys the rules of every call."""

from __future__ import annotations

import gc
from typing import Any

import attention_arena as arena
import attention_cases as cases
import pytest
import torch
from attention_cases import SIMPLE, Shape, operation, short
from watched import CYCLES, behind_a_kernel, launched, no_synchronization

import warploom
from warploom.errors import DeviceError, ProblemError
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
SHAPE = Shape(2, 20, 4, 517, 517)


def make(name: str, seed: int = 0) -> arena.Call:
    """A call of one of the simple kernels, with its mask and its kind of lengths."""
    if name == "packed":
        lengths = [65, 1, 128, 63, 200]
        return arena.packed(SIMPLE[name], lengths, lengths, seed=seed, causal="bottom_right")
    return arena.call(SIMPLE[name], SHAPE, seed=seed, causal=name != "none")


@pytest.mark.parametrize("name", SIMPLE)
def test_a_captured_call_replays_on_new_contents(name: str) -> None:
    made = make(name)
    made.run()
    gc.collect()  # or another test's graph may die, and be reset, during this capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = made.run()
    for seed in (1, 2):
        arena.fill(made, seed)
        made.out.room.fill_(-1)
        graph.replay()
        arena.assert_right(made, out, lse)
        assert made.out.untouched_outside()


def test_a_first_call_during_capture_is_refused() -> None:
    unused = cases.spec(64, 32, dim=64, mask="causal", stages=3)
    made = arena.call(unused, SHAPE, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(DeviceError, match="capturing"):
        made.run()
    arena.verify(made)


@pytest.mark.parametrize("name", ["causal", "packed", "dynamic"])
def test_two_streams_do_not_share_what_a_launch_needs(name: str) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    calls = [make(name, seed) for seed in (1, 2)]
    for made in calls:
        made.run()
    torch.cuda.synchronize()
    found: list[arena.Pair] = []
    for _ in range(50):
        found = []
        for stream, made in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(made.run())
    torch.cuda.synchronize()
    for made, results in zip(calls, found, strict=True):
        arena.assert_right(made, *results)


@pytest.mark.parametrize("name", ["none", "dynamic"])
def test_a_result_waits_for_what_its_stream_does_before(name: str) -> None:
    made = make(name)
    source = made.v.view.clone()
    made.v.view.fill_(torch.nan)
    made.run()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        made.v.view.copy_(source)
        out, lse = made.run()
        after = out.clone(), lse.clone()
    stream.synchronize()
    arena.assert_right(made, *after)


def test_launches_one_after_the_other_see_each_others_results() -> None:
    """Kernels may start early, under the last blocks of the one before: they must still wait."""
    first = make("causal")
    second, third = torch.empty_like(first.q.view), torch.empty_like(first.q.view)
    k, v = first.k.view, first.v.view
    expected = warploom.attention(first.q.view, k, v, causal=True)
    expected = warploom.attention(expected.clone(), k, v, causal=True).clone()
    for _ in range(50):
        second.fill_(torch.nan)
        warploom.attention(first.q.view, k, v, causal=True, out=second)
        warploom.attention(second, k, v, causal=True, out=third)
        assert torch.equal(third, expected)


def test_no_call_waits_for_the_gpu() -> None:
    calls = [make(name) for name in SIMPLE]
    for made in calls:
        made.run()
    odd = torch.randn(2, 4, 130, 65, device="cuda").bfloat16()[..., :64]
    with no_synchronization():
        for made in calls:
            made.run()
        warploom.attention(odd, odd, odd)  # planned here, and copied
    results = behind_a_kernel(lambda: [made.run() for made in calls])
    for made, found in zip(calls, results, strict=True):
        arena.assert_right(made, *found)


@pytest.mark.parametrize("kernel", SIMPLE.values(), ids=short)
def test_only_our_kernels_and_memsets_run_and_as_many_for_any_size(kernel: KernelSpec) -> None:
    counts = set()
    causal = operation(kernel).mask == "causal"
    for batch, length in ((1, 65), (7, 1021)):
        if operation(kernel).lengths == "packed":
            made = arena.packed(kernel, [length] * batch, [length] * batch, causal="top_left")
        else:
            made = arena.call(kernel, Shape(batch, 4, 2, length, length), causal=causal)
        made.run()
        ran = launched(made.run)
        ours = [name for name in ran if name == kernel.name]
        memsets = [name for name in ran if "Memset" in name or "FillFunctor" in name]
        assert len(ours) + len(memsets) == len(ran), ran
        counts.add((len(ours), len(memsets)))
    assert counts <= {(1, 0), (1, 1)}
    assert len(counts) == 1


def test_a_plan_is_made_once_and_reused_for_other_tensors_and_numbers() -> None:
    calls = [make("causal", seed) for seed in (1, 2, 3)]
    calls[0].run()
    before = warploom.counters.as_dict()
    for scale, made in enumerate(calls * 2, 1):
        made.keywords["scale"] = 0.1 * scale
        arena.verify(made)
    after = warploom.counters.as_dict()
    assert (after["plans"], after["copies"]) == (before["plans"], before["copies"])
    assert after["launches"] == before["launches"] + 6


def test_a_plan_runs_what_it_was_made_for() -> None:
    made = make("causal")
    plan = warploom.plan_attention(*made.given, causal=True, spec=made.spec, out=made.out.view)
    keywords: dict[str, Any] = {"causal": True, "spec": made.spec, "out": made.out.view}
    arena.assert_right(made, *plan(*made.given, **keywords))
    q, k, v = made.given
    for wrong in ((q[:1], k[:1], v[:1]), (q.half(), k.half(), v.half()), (q.cpu(), k, v)):
        with pytest.raises(ProblemError, match="that the plan was made for"):
            plan(*wrong, **keywords)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_torch_compile_takes_attention_without_a_graph_break(backend: str) -> None:
    made = make("causal")
    weight = torch.randn(64, 64, device="cuda", dtype=made.q.view.dtype) / 8
    packed = make("packed")

    def layer(q: torch.Tensor) -> torch.Tensor:
        out = warploom.attention(q @ weight, made.k.view, made.v.view, causal=True)
        return out.transpose(1, 2).flatten(2) * 2

    def sequences(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = {**packed.keywords, "window": (30, None)}
        out, lse = warploom.attention(q, packed.k.view, packed.v.view, return_lse=True, **given)
        return out * 1, lse * 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert torch.allclose(compiled(made.q.view), layer(made.q.view), atol=2e-2, rtol=2e-2)
    compiled_sequences = torch.compile(sequences, fullgraph=True, backend=backend)
    found = compiled_sequences(packed.q.view)
    for one, wanted in zip(found, sequences(packed.q.view), strict=True):
        assert torch.equal(one, wanted)


def test_torch_compile_writes_to_out() -> None:
    made = make("causal")

    def into(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, made.k.view, made.v.view, causal=True, out=out)

    compiled = torch.compile(into, fullgraph=True, backend="inductor")
    out = torch.full_like(made.q.view, torch.nan)
    compiled(made.q.view, out)
    assert torch.equal(out, into(made.q.view, torch.empty_like(out)))


def test_torch_finds_no_fault_with_the_operators() -> None:
    made = make("causal")
    arguments = (*made.given, "equal", None, None, None, 0.2, *[None] * 5)
    torch.library.opcheck(torch.ops.warploom.attention.default, (*arguments, None, None))
    into = (*arguments, torch.zeros_like(made.q.view))
    torch.library.opcheck(torch.ops.warploom.attention_into.default, into)


def test_a_call_runs_where_its_tensors_are_and_not_on_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    made = make("dynamic")
    expected = arena.verify(made)[0].to("cuda:1")
    q, k, v = (tensor.to("cuda:1") for tensor in made.given)
    for stream in (torch.cuda.default_stream(1), torch.cuda.Stream(1)):
        stream.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(stream), torch.cuda.device(0):
            out = warploom.attention(q, k, v, causal=True, spec=made.spec)
        stream.synchronize()
        assert torch.equal(out, expected)
        assert torch.cuda.current_device() == 0
