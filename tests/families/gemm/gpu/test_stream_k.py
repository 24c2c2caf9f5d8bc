"""Tiles that clusters share: every element, the same bits in every run, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import gemm_arena as arena
import gemm_cases as cases
import gemm_wider as wider
import pytest
import torch
from gemm_cases import short

from warploom.generator.artifact import Artifact
from warploom.generator.families._product.launch import cut
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import driver

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
Tiles = Callable[[int], int]
TILES: dict[str, Tiles] = {  # of as many clusters as run at a time
    "one tile": lambda clusters: 1,
    "fewer tiles than clusters": lambda clusters: clusters // 3 + 1,
    "half as many tiles as clusters": lambda clusters: clusters // 2,  # cut alike
    "one tile more than clusters": lambda clusters: clusters + 1,
    "two waves and a half": lambda clusters: 2 * clusters + clusters // 2,
}
over_tiles = pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
over_kernels = pytest.mark.parametrize("kernel", wider.STREAMED, ids=short)
SIMPLE = wider.STREAMED[0]


@pytest.fixture(scope="module", autouse=True)
def built(build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]]) -> None:
    artifacts = build(wider.STREAMED)
    assert all(one.resources[one.name].spill_bytes == 0 for one in artifacts.values())
    assert [one.name for one in artifacts.values() if one.serialised] == []


def call(kernel: KernelSpec, tiles: Tiles, seed: int = 0) -> arena.Call:
    """A call of which tiles are cut, the last of them ragged."""
    operation = cast("GemmOperation", kernel.operation)
    schedule = cast("GemmSchedule", kernel.schedule)
    device = driver.limits(0)
    count = tiles(device.clusters(schedule.cluster_size))
    batches = ((2,), (2,)) if operation.batched else ((), ())
    along = -(-count // 2) if operation.batched else count
    rows, columns = (schedule.tile[i] * schedule.cluster[i] for i in range(2))
    k = schedule.tile[2] * schedule.cluster_split_k * 32 + 5 if count > 1 else 60_000
    shape = (rows - 3, columns * along - (11 if columns > 16 else 5), k)
    m, n, k = cases.fitting(shape, kernel)
    found = cut(schedule, GemmShape(m, n, k, 2 if operation.batched else 1), device)
    assert found.tiles > 0
    return arena.call(kernel, m, n, k, seed=seed, batches=batches)


def results(made: arena.Call) -> list[torch.Tensor]:
    """What a call stores, once more."""
    arena.clear(made)
    made.d.room.fill_(-1)
    made.run()
    return [output.room.clone() for output in (made.d, *made.outputs)]


@over_tiles
@over_kernels
def test_no_part_of_a_tile_is_lost_or_added_twice(kernel: KernelSpec, tiles: Tiles) -> None:
    made = call(kernel, tiles)
    arena.verify(made)
    first = results(made)
    for _ in range(8):  # whoever comes last, parts are added in one order
        assert all(map(torch.equal, results(made), first))


@pytest.mark.parametrize("kernel", wider.STREAMED[:10:3], ids=short)
def test_a_hundred_launches_behind_each_other_have_the_same_bits(kernel: KernelSpec) -> None:
    made = call(kernel, TILES["fewer tiles than clusters"])
    first = results(made)[0]
    out = [torch.empty_like(made.d.room) for _ in range(100)]
    for room in out:  # nothing waits for anything but its turn
        made.run()
        room.copy_(made.d.room)
    assert all(torch.equal(room, first) for room in out)


def test_streams_share_neither_flags_nor_parts() -> None:
    calls = [call(SIMPLE, tiles, seed) for seed, tiles in enumerate(TILES.values())]
    expected = [results(made)[0] for made in calls]
    torch.cuda.synchronize()
    streams: list[Any] = [torch.cuda.Stream() for _ in calls]
    for made in calls:
        made.d.room.fill_(-1)
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, made in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                made.run()
    torch.cuda.synchronize()
    assert all(torch.equal(made.d.room, room) for made, room in zip(calls, expected, strict=True))


def test_captured_launches_replay_beside_others() -> None:
    calls = [call(SIMPLE, tiles, seed) for seed, tiles in enumerate(TILES.values())]
    expected = [results(made)[0] for made in calls]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph, half in zip(graphs, (calls[:2], calls[2:]), strict=True):
        with torch.cuda.graph(graph):
            for made in half * 2:
                made.run()
    other = call(SIMPLE, TILES["one tile more than clusters"], 9)
    beside = results(other)[0]
    torch.cuda.synchronize()
    streams: list[Any] = [torch.cuda.Stream() for _ in graphs]
    for _ in range(5):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        other.run()
    torch.cuda.synchronize()
    assert torch.equal(other.d.room, beside)
    assert all(torch.equal(made.d.room, room) for made, room in zip(calls, expected, strict=True))
