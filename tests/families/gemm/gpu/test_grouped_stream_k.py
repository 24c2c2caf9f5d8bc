"""Grouped GEMMs whose CTAs share k tiles, against float64, over routings that no tile divides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gemm_grouped as grouped
import gemm_grouped_stream_k as shared
import pytest
import torch
from gemm_cases import short
from processes import run
from product_arena import assert_within

from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built_here")]
RAGGED = grouped.ROUTINGS["ragged"]
INTEGERS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="module")
def built_here(
    build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]],
) -> dict[str, Artifact]:
    """The kernels of these tests, by name."""
    artifacts = build(shared.KERNELS)
    assert all(one.resources[one.name].spill_bytes == 0 for one in artifacts.values())
    assert [one.name for one in artifacts.values() if one.serialised] == []
    return artifacts


def bits(made: grouped.Call) -> torch.Tensor:
    """What a call stores, once more: its bits, and poison where it stores nothing."""
    made.d.room.fill_(-1)
    d = made.run()
    assert made.d.untouched_outside()
    return d.view(INTEGERS[d.dtype.itemsize]).clone()


@pytest.mark.parametrize("name", shared.ROUTED)
@pytest.mark.parametrize("kernel", shared.KERNELS, ids=short)
def test_every_k_tile_is_added_once(kernel: KernelSpec, name: str) -> None:
    """Groups without rows are poisoned, as are rows past the last offset; flags are left cleared:
    otherwise a later launch would add parts that nobody has left yet.
    """
    routing, k = shared.ROUTED[name]
    if routing.size == 1 and "scale_row" in kernel.name:
        pytest.skip("a scale of one row is one number, which another kernel takes")
    made = grouped.call(kernel, routing, k=k)
    if name in ("eight rows", "one group has all"):  # whose tiles are few for every kernel
        assert shared.walk(made).cut > 0
    grouped.verify(made)
    first = bits(made)
    for _ in range(4):
        assert torch.equal(bits(made), first)


@pytest.mark.parametrize("k", [64, 400, 1008, 4096])
@pytest.mark.parametrize(
    "kernel", [shared.ROWS[0], shared.ROWS[6], *shared.BLOCKS[:2], shared.MASKED[0]], ids=short
)
def test_any_k_is_shared(kernel: KernelSpec, k: int) -> None:
    """Also a single k tile, and one that is short."""
    for name in ("eight rows", "ragged", "one group has all", "more tiles than multiprocessors"):
        grouped.verify(grouped.call(kernel, shared.ROUTED[name][0], seed=k, k=k))


@pytest.mark.parametrize("kernel", shared.BLOCKS, ids=short)
def test_block_scales_along_k_are_those_of_the_part(kernel: KernelSpec) -> None:
    """Warps copy them, which walk as the thread does that issues TMA loads."""
    for name in ("ragged", "forty rows"):
        routing, k = shared.ROUTED[name]
        grouped.verify(grouped.call(kernel, routing, seed=1, k=k, along_k=True))


@pytest.mark.parametrize(
    "kernel", [shared.ROWS[0], shared.ROWS[3], shared.ROWS[5], shared.ROWS[6]], ids=short
)
def test_one_graph_serves_all_routings(kernel: KernelSpec) -> None:
    """Whatever the device cuts for them; a group has all rows of one, and none of the last."""
    made = grouped.call(kernel, RAGGED, k=2880)
    grouped.verify(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run()
    for seed, how in enumerate(("even", "skewed", "one", "even"), 1):
        again = grouped.call(kernel, replace(RAGGED, how=how), seed=seed, k=2880)
        made.offs.copy_(again.offs)
        made.a.view.copy_(again.a.view)  # poisoned where this one has no groups
        made.b.view.copy_(again.b.view)
        for _ in range(2):
            _replay(made, graph)
    made.offs.zero_()
    _replay(made, graph)


def _replay(made: grouped.Call, graph: torch.cuda.CUDAGraph) -> None:
    """Replay a graph, and compare what it stores with the reference of the offsets there are."""
    made.d.room.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert made.d.untouched_outside()
    counted, (exact, bound), d = made.call.counted(), made.exact(), made.d.view
    assert (d[~counted].view(INTEGERS[d.dtype.itemsize]) == -1).all()
    assert_within(d[counted], exact[counted], bound[counted])


@pytest.mark.parametrize(
    "ends",
    [
        [5, 3, 900, -4, 100, 2**31 - 1],
        [-5] * 6,
        [800] * 6,
        [100, 200, 150, 300, 250, 700],
        [-(2**31), 2**31 - 1, 0, 0, 0, 0],
    ],
    ids=str,
)
def test_offsets_that_only_the_device_sees_are_clamped(ends: list[int]) -> None:
    """Whatever they are, nothing outside of D is written, and no CTA waits for ever."""
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    clamped = offs.clamp(0, 700).cummax(0).values.to(torch.int32)
    for kernel in (shared.ROWS[0], shared.ROWS[3], shared.ROWS[6]):
        made = grouped.call(kernel, grouped.Routing(700, 6, "even", 0), k=2880)
        made.offs.copy_(offs)
        found = bits(made)
        assert torch.equal(bits(made), found)
        made.offs.copy_(clamped)
        exact, bound = made.exact()
        last = int(clamped[-1])
        assert (found[last:] == -1).all()
        assert_within(made.d.view[:last], exact[:last], bound[:last])


def test_streams_share_neither_flags_nor_parts() -> None:
    names = ("eight rows", "forty rows", "ragged", "skewed", "most are empty")
    calls = [
        grouped.call(shared.ROWS[0], shared.ROUTED[name][0], seed=seed, k=2880)
        for seed, name in enumerate(names)
    ]
    expected = [bits(made) for made in calls]
    torch.cuda.synchronize()
    for made in calls:
        made.d.room.fill_(-1)
    torch.cuda.synchronize()
    streams: list[Any] = [torch.cuda.Stream() for _ in calls]
    for _ in range(10):
        for stream, made in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                made.run()
    torch.cuda.synchronize()
    for made, wanted in zip(calls, expected, strict=True):
        assert torch.equal(made.d.view.view(wanted.dtype), wanted)


@pytest.mark.parametrize("name", shared.MUTANTS)
def test_a_kernel_that_loses_or_repeats_k_tiles_is_caught(name: str) -> None:
    chosen = shared.MUTANTS[name]
    k = shared.LONG.get(name, 2880)
    grouped.verify(grouped.call(chosen.kernel, chosen.routing, k=k))
    done = run(sys.executable, str(shared.__file__), name, timeout=100)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
