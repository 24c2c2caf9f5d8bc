"""What captured launches count in: a graph has its own, no two share it, and it is given back.

A lost or shared counter leaves tiles unwritten, or chunks of keys out, so results are NaN
beforehand. Kernels here take tiles from a counter; decoding counts the parts of each sequence.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import time
from collections.abc import Callable

import attention_cases
import decode_cases
import pytest
import torch
from cuda.bindings import driver

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime import kept
from warploom.runtime.driver import check

pytestmark = pytest.mark.gpu
KERNEL, DECODE = attention_cases.SIMPLE["dynamic"], decode_cases.SIMPLE["small"]
LONGEST = 30  # seconds until the driver's thread has told of a graph that is gone
Run = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def built(build: Callable[[list[KernelSpec]], object]) -> None:
    build([KERNEL, DECODE])


def tensors(*shapes: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(one, device="cuda", generator=generator).bfloat16() for one in shapes]


def tiles(seed: int, seq: int = 1009) -> tuple[Run, torch.Tensor]:
    """A call that takes tiles from a counter, and a tensor for its result."""
    q, k, v = tensors(*[(2, 12, seq, KERNEL.operation.dim)] * 3, seed=seed)  # type: ignore[attr-defined]
    return lambda out: warploom.attention(q, k, v, causal=True, spec=KERNEL, out=out), q


def parts(seed: int, batch: int = 3) -> tuple[Run, torch.Tensor]:
    """A call whose blocks count the parts of each sequence that are done."""
    cache = (batch, 8, 2000, 64)
    q, k, v = tensors((batch, 32, 1, 64), cache, cache, seed=seed)
    lengths = torch.full((batch,), 2000, device="cuda", dtype=torch.int32)
    return lambda out: warploom.attention_decode(
        q, k, v, cache_seqlens=lengths, spec=DECODE, out=out
    ), q


class Captured:
    """A graph of calls, each of which writes a tensor of its own, and what they must write."""

    def __init__(self, calls: list[tuple[Run, torch.Tensor]], **options: object) -> None:
        self.calls = calls  # which hold what the graph reads
        self.outs = [torch.full_like(like, torch.nan) for _, like in calls]
        self.expected = [run(torch.full_like(like, torch.nan)) for run, like in calls]
        torch.cuda.synchronize()
        gc.collect()  # or another test's graph may die, and be reset, during this capture
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, **options):  # type: ignore[arg-type]
            for (run, _), out in zip(calls, self.outs, strict=True):
                run(out)

    def clear(self) -> None:
        for out in self.outs:
            out.fill_(torch.nan)

    def assert_right(self) -> None:
        for out, right in zip(self.outs, self.expected, strict=True):
            assert torch.equal(out, right)


def gone(one: kept._Zeros) -> bool:
    """Whether the driver has destroyed what a graph had for this workspace."""
    value = ctypes.c_int()
    assert kept._libc.sem_getvalue(ctypes.c_void_p(one.semaphore), ctypes.byref(value)) == 0
    return value.value > 0


def wait_until_all_are_gone(lent: list[kept._Zeros]) -> None:
    deadline = time.monotonic() + LONGEST
    while not all(map(gone, lent)):
        assert time.monotonic() < deadline, "the driver told of no graph's end"
        time.sleep(0.001)


@pytest.mark.parametrize("make", [tiles, parts])
def test_a_graph_takes_one_workspace_and_gives_it_back(
    make: Callable[[int], tuple[Run, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each captured launch had its own for good: 1 MiB for every capture of 32 layers."""
    calls = [make(1)] * 8
    for run, like in calls[:1]:
        run(torch.empty_like(like))
    allocated: list[int] = []
    real = kept._allocate
    monkeypatch.setattr(
        kept, "_allocate", lambda device, size: allocated.append(size) or real(device, size)
    )
    for index in range(60):
        before = {key for key, _ in kept._lent}
        made = Captured(calls)
        own = [one for key, one in kept._lent if key not in before]
        assert len(own) == 1
        assert not gone(own[0])
        made.graph.replay()
        torch.cuda.synchronize()
        assert not gone(own[0])
        made.assert_right()
        made.graph.reset()
        wait_until_all_are_gone(own)
        if index == 0:
            allocated.clear()
    assert allocated == []


def test_a_graph_that_is_gone_while_it_runs_keeps_its_workspace_until_it_ends() -> None:
    """The next graph would count in what its kernels still count in."""
    before, cycles = {key for key, _ in kept._lent}, 200_000_000
    made = [Captured([tiles(seed, 3001)] * 4) for seed in (1, 2)]
    own = [one for key, one in kept._lent if key not in before]
    assert len(own) == 2
    for one in made:
        one.clear()
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    busy = torch.cuda.Event()
    made[0].graph.replay()
    busy.record()
    del made[0].graph
    assert not gone(own[0]) or busy.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    made[0].assert_right()
    wait_until_all_are_gone(own[:1])
    assert not gone(own[1])


def test_graphs_of_one_pool_find_zeros_whatever_lies_in_it() -> None:
    """Each may overwrite what the other has freed there."""
    one = Captured([tiles(1), parts(2)])
    two = Captured([parts(3, 40), tiles(4, 517)], pool=one.graph.pool())

    def write_all() -> None:
        for size in (128, 1 << 10, 1 << 16, 1 << 20, 1 << 24):
            [torch.full((size,), 255, device="cuda", dtype=torch.uint8) for _ in range(4)]

    write_all()  # torch loads its kernels
    torch.cuda.synchronize()
    gc.collect()
    poison = torch.cuda.CUDAGraph()
    with torch.cuda.graph(poison, pool=one.graph.pool()):
        write_all()
    for order in itertools.islice(itertools.cycle([(one, two), (two, one)]), 20):
        for made in order:
            made.clear()
            poison.replay()
            made.graph.replay()
            torch.cuda.synchronize()
            made.assert_right()


@pytest.mark.parametrize("make", [tiles, parts])
def test_graphs_captured_on_one_stream_run_beside_each_other(
    make: Callable[[int], tuple[Run, torch.Tensor]],
) -> None:
    """With one workspace for both, each would count in the other's counters.

    So would a call on the stream of the capture. Tiles are then left unwritten, or chunks of keys
    are left out.
    """
    stream = torch.cuda.Stream()
    made = [Captured([make(seed)] * 4, stream=stream) for seed in (1, 2)]
    sides = [torch.cuda.Stream() for _ in made]
    eager, like = make(3)
    expected, out = eager(torch.empty_like(like)), torch.empty_like(like)
    for _ in range(40):
        for one in made:
            one.clear()
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        for one, side in zip(made, sides, strict=True):
            with torch.cuda.stream(side):
                one.graph.replay()
        with torch.cuda.stream(stream):  # where both were captured
            eager(out)
        torch.cuda.synchronize()
        for one in made:
            one.assert_right()
        assert torch.equal(out, expected)


def test_branches_of_a_graph_share_nothing_and_launches_of_each_do() -> None:
    """Branches run at the same time: with one workspace they would count in the same counters.

    With a workspace for each launch, memory would grow with the launches of a graph.
    """
    calls = [tiles(1), parts(2)], [tiles(3), parts(4)]
    outs = [[torch.empty_like(like) for _, like in branch] for branch in calls]
    expected = [[run(torch.empty_like(like)) for run, like in branch] for branch in calls]
    side, before = torch.cuda.Stream(), len(kept._lent)
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for _ in range(3):  # the side stream joins, and leaves again
            side.wait_stream(main)
            for (own, at), (other, there) in zip(
                zip(calls[0], outs[0], strict=True),
                zip(calls[1], outs[1], strict=True),
                strict=True,
            ):
                own[0](at)
                with torch.cuda.stream(side):
                    other[0](there)
            main.wait_stream(side)
    assert len(kept._lent) <= before + 4  # of two sizes, for two branches
    for _ in range(40):
        for out in itertools.chain(*outs):
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for found, right in zip(itertools.chain(*outs), itertools.chain(*expected), strict=True):
            assert torch.equal(found, right)


def test_a_workspace_lives_as_long_as_the_last_that_was_made_of_a_graph() -> None:
    """A capture's graph is destroyed at its end; what was cloned and instantiated of it runs on."""
    run, like = tiles(1)
    expected, out = run(torch.empty_like(like)), torch.empty_like(like)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check(driver.cuStreamBeginCapture(stream.cuda_stream, mode))
        run(out)
        graph = check(driver.cuStreamEndCapture(stream.cuda_stream))
    (own,) = [one for _, one in kept._lent[-1:]]
    clone = check(driver.cuGraphClone(graph))
    check(driver.cuGraphDestroy(graph))
    executable = check(driver.cuGraphInstantiate(clone, 0))
    check(driver.cuGraphDestroy(clone))
    for _ in range(3):
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        check(driver.cuGraphLaunch(executable, stream.cuda_stream))
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
    time.sleep(0.1)
    assert not gone(own)
    check(driver.cuGraphExecDestroy(executable))
    wait_until_all_are_gone([own])
