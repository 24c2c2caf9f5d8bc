"""Streams, graphs, threads, devices and plans: what a call must and must not do around a launch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gemm_arena as arena
import gemm_cases as cases
import pytest
import torch
from gemm_cases import SIMPLE
from watched import CYCLES, behind_a_kernel, launched, no_synchronization

import warploom
from warploom.errors import DeviceError, ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


def unused(number: int) -> KernelSpec:
    """A kernel that no other test has loaded; building it is part of its first use."""
    return cases.spec((128, 64), swizzle_size=100 + number)


def assert_right(made: arena.Call) -> None:
    """Assert that D, which some launch wrote, is that of the operands."""
    bound = reference.gemm_bound(made.a.view, made.b.view, made.listed, made.d.view.dtype)
    arena.assert_within(made.d.view, *bound)


def test_a_result_waits_for_what_its_stream_does_before() -> None:
    made = arena.call(SIMPLE["tma"], 257, 136, 193)
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
    assert_right(made)
    assert torch.equal(after, made.d.view)


def test_two_streams_do_not_share_what_a_launch_needs() -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    calls = [arena.call(SIMPLE["tma"], 1021, 264, 193, seed=seed) for seed in (1, 2)]
    odd = [arena.guarded(1021, 193, torch.bfloat16, odd=True).view for _ in calls]
    for view, made in zip(odd, calls, strict=True):
        view.copy_(made.a.view)
    torch.cuda.synchronize()
    copied = []
    for _ in range(50):
        copied = []
        for stream, made, view in zip(streams, calls, odd, strict=True):
            with torch.cuda.stream(stream):
                made.run()
                copied.append(warploom.gemm(view, made.b.view, spec=made.spec))
    torch.cuda.synchronize()
    for made, d in zip(calls, copied, strict=True):
        assert_right(made)
        assert torch.equal(d, made.d.view)


def test_a_captured_call_replays_on_new_contents() -> None:
    made = arena.call(SIMPLE["layer"], 257, 136, 193)
    odd = arena.guarded(257, 193, torch.bfloat16, odd=True).view

    def run() -> torch.Tensor:
        made.run()
        return warploom.gemm(odd, made.b.view, epilogue=made.listed, spec=made.spec)

    odd.copy_(made.a.view)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copied = run()
    for seed in (1, 2):
        arena.fill(made.a.view, torch.Generator("cuda").manual_seed(seed))
        arena.fill(made.listed[1][1], torch.Generator("cuda").manual_seed(seed))
        odd.copy_(made.a.view)
        made.d.room.fill_(-1)
        graph.replay()
        assert_right(made)
        assert torch.equal(copied, made.d.view)
        assert made.d.untouched_outside()


def test_a_captured_plan_replays_too() -> None:
    made = arena.call(SIMPLE["tma"], 257, 136, 193)
    plan = warploom.plan(made.a.view, made.b.view, out=made.d.view, spec=made.spec)
    plan(made.a.view, made.b.view, made.d.view)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(made.a.view, made.b.view, made.d.view)
    arena.fill(made.a.view, torch.Generator("cuda").manual_seed(1))
    graph.replay()
    assert_right(made)


def test_a_first_call_during_capture_is_refused_and_leaves_the_graph_whole() -> None:
    made = arena.call(unused(0), 257, 136, 193)
    x = torch.zeros(131, device="cuda")
    x + 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(DeviceError, match="capturing") as caught:
            made.run()
        z = y * 2
    assert "warmup" in caught.value.fix
    x.fill_(3)
    graph.replay()
    assert (z == 8).all()
    arena.verify(made)


def test_a_new_shape_of_a_loaded_kernel_may_be_captured() -> None:
    arena.call(SIMPLE["tma"], 257, 136, 193).run()
    made = arena.call(SIMPLE["tma"], 251, 144, 197)
    gc.collect()  # or another test's graph may die, and be reset, during this capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run()
    assert not made.d.view.isfinite().any()
    graph.replay()
    assert_right(made)


def test_threads_that_are_first_together_load_a_kernel_once() -> None:
    kernel, threads = unused(1), 8
    calls = [arena.call(kernel, 257, 136, 193, seed=seed) for seed in range(threads)]
    torch.cuda.synchronize()
    before = warploom.counters.as_dict()
    barrier = threading.Barrier(threads)

    def run(made: arena.Call) -> None:
        barrier.wait()
        for _ in range(20):
            made.run()
        torch.cuda.synchronize()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, calls))
    for made in calls:
        assert_right(made)
    after = warploom.counters.as_dict()
    assert after["loads"] - before["loads"] == 1
    assert after["compiles"] - before["compiles"] == 1


@pytest.mark.parametrize("warm", [True, False])
def test_a_thread_that_is_new_to_cuda_can_launch(warm: bool) -> None:
    made = arena.call(SIMPLE["tma"] if warm else unused(2), 257, 136, 193)
    plan = (
        warploom.plan(made.a.view, made.b.view, out=made.d.view, spec=made.spec) if warm else None
    )
    run: Callable[[], Any] = made.run
    if plan is not None:
        plan(made.a.view, made.b.view, made.d.view)
        run = lambda: plan(made.a.view, made.b.view, made.d.view)  # noqa: E731
    made.d.room.fill_(-1)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()
    assert_right(made)


def test_a_plan_is_made_once_and_reused_for_other_tensors() -> None:
    calls = [arena.call(SIMPLE["tma"], 263, 136, 199, seed=seed) for seed in (1, 2, 3)]
    before = warploom.counters.plans
    for made in calls * 2:
        arena.verify(made)
    assert warploom.counters.plans == before + 1


def test_a_plan_refuses_what_it_was_not_made_for() -> None:
    made = arena.call(SIMPLE["tma"], 257, 136, 193)
    a, b, d = made.a.view, made.b.view, made.d.view
    plan = warploom.plan(a, b, out=d, spec=made.spec)
    for _ in range(2):
        assert plan(a, b, d) is d
        assert_right(made)
    launches = warploom.counters.launches
    wrong = [
        (a[:255], b, d[:255]),
        (a, b[:, :128], d[:, :128]),
        (a.half(), b, d),
        (a.contiguous(), b, d),
        (a, b.contiguous(), d),
        (a, b, d.float()),
        (a, b, d.contiguous()),
        (a.cpu(), b, d),
    ]
    for arguments in wrong:
        with pytest.raises(ProblemError, match="that the plan was made for"):
            plan(*arguments)
    assert warploom.counters.launches == launches


def test_addresses_that_come_back_with_other_shapes_get_their_own_launch() -> None:
    room = torch.empty(1 << 20, dtype=torch.bfloat16, device="cuda")
    b_room, d_room = torch.empty_like(room), torch.empty_like(room)
    for m, n, k in ((257, 136, 200), (131, 264, 208), (257, 136, 200), (64, 136, 72)):
        a, b = room[: m * k].view(m, k), b_room[: n * k].view(n, k).t()
        for operand in (a, b):
            arena.fill(operand, torch.Generator("cuda").manual_seed(m))
        d = warploom.gemm(a, b, out=d_room[: m * n].view(m, n), spec=SIMPLE["tma"])
        arena.assert_within(d, *reference.gemm_bound(a, b, [], d.dtype))


def test_no_call_waits_for_the_gpu() -> None:
    made = arena.call(SIMPLE["layer"], 257, 136, 193)
    odd = arena.guarded(257, 193, torch.bfloat16, odd=True).view
    odd.copy_(made.a.view)
    made.run()
    fresh = arena.call(SIMPLE["layer"], 251, 144, 197)
    with no_synchronization():
        made.run()
        fresh.run()  # planned here
        warploom.gemm(odd, made.b.view, epilogue=made.listed, spec=made.spec)  # copied first
    behind_a_kernel(made.run)
    assert_right(made)
    assert_right(fresh)


def test_nothing_but_the_kernel_runs_for_operands_in_place() -> None:
    made = arena.call(SIMPLE["tma"], 257, 136, 193)
    made.run()
    assert launched(made.run) == [made.spec.name]
    ran = launched(lambda: warploom.gemm(made.a.view, made.b.view, spec=made.spec))
    assert ran == [made.spec.name]


def test_load_makes_a_kernel_ready_and_warmup_a_configuration(tmp_path: Path) -> None:
    before = warploom.counters.loads
    warploom.load(unused(3).name)
    assert warploom.counters.loads == before + 1
    file = tmp_path / "one.yaml"
    file.write_text(
        "version: 1\narch: sm_90a\nkernels:\n"
        "  - operations: [{family: gemm, a: bf16, b: bf16, d: bf16}]\n"
        "    schedules: [{tile: [128, 64, 64], swizzle_size: 104}]\n"
    )
    assert warploom.warmup(file) == 1
    made = arena.call(unused(4), 257, 136, 193)
    counters = warploom.counters.as_dict()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing is left to compile or load
        made.run()
    graph.replay()
    assert_right(made)
    assert warploom.counters.loads == counters["loads"]
    assert warploom.counters.compiles == counters["compiles"]


def test_a_call_runs_where_its_tensors_are_and_not_on_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    made = arena.call(SIMPLE["tma"], 257, 136, 193)
    expected = arena.verify(made).to("cuda:1")
    a, b = made.a.view.to("cuda:1"), made.b.view.to("cuda:1")
    out = torch.full((257, 136), torch.nan, dtype=torch.bfloat16, device="cuda:1")
    for stream in (torch.cuda.default_stream(1), torch.cuda.Stream(1)):
        stream.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(stream), torch.cuda.device(0):
            d = warploom.gemm(a, b)
            warploom.gemm(a, b, out=out)
        stream.synchronize()
        assert d.device == out.device == torch.device("cuda:1")
        assert torch.equal(d, expected)
        assert torch.equal(out, expected)
        assert torch.cuda.current_device() == 0
