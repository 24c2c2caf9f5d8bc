"""Tiles that blocks share: every element, the same bits in every run, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable

import mixed_arena as arena
import mixed_cases as cases
import pytest
import torch
from mixed_cases import SIMPLE, short

from warploom.generator.families.mixed_gemm import MixedGemmShape
from warploom.generator.families.mixed_gemm.launch import cut
from warploom.generator.specification import KernelSpec
from warploom.runtime import driver

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built", "poisoned")]
Tiles = Callable[[int], int]
TILES: dict[str, Tiles] = {  # of as many blocks as run at a time
    "one tile": lambda blocks: 1,
    "fewer tiles than blocks": lambda blocks: blocks // 3 + 1,
    "one tile more than blocks": lambda blocks: blocks + 1,
    "five waves and a half": lambda blocks: 5 * blocks + blocks // 2,
}
over_tiles = pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
COLUMNS = 3  # of tiles, where there are many


def call(kernel: KernelSpec, tiles: Tiles, seed: int = 0) -> arena.Call:
    """A call of which tiles are cut, the last of them ragged."""
    device = driver.limits(0)
    count = tiles(device.clusters(1))
    rows, columns, depth = cases.schedule(kernel).tile
    across = COLUMNS if count > 1 else 1
    shape = (rows * -(-count // across) - 3, columns * across - 11, 6 * depth + 5)
    if count == 1:
        shape = (*shape[:2], 100 * depth + 5)
    m, n, k = cases.fitting(shape, kernel)
    assert cut(cases.schedule(kernel), MixedGemmShape(m, n, k), device).tiles > 0
    return arena.call(kernel, m, n, k, seed=seed)


def results(made: arena.Call) -> list[torch.Tensor]:
    """What a call stores, once more."""
    made.d.room.fill_(-1)
    made.run()
    return [output.room.clone() for output in (made.d, *made.outputs)]


@over_tiles
@pytest.mark.parametrize("kernel", cases.STREAMED, ids=short)
def test_no_part_of_a_tile_is_lost_or_added_twice(kernel: KernelSpec, tiles: Tiles) -> None:
    made = call(kernel, tiles)
    arena.verify(made)
    first = results(made)
    for _ in range(8):  # whoever comes last, parts are added in one order
        assert all(map(torch.equal, results(made), first))


@pytest.mark.parametrize("kernel", [SIMPLE["few"], SIMPLE["some"]], ids=short)
def test_a_hundred_launches_behind_each_other_have_the_same_bits(kernel: KernelSpec) -> None:
    made = call(kernel, TILES["fewer tiles than blocks"])
    first = results(made)[0]
    out = [torch.empty_like(made.d.room) for _ in range(100)]
    for room in out:  # nothing waits for anything but its turn
        made.run()
        room.copy_(made.d.room)
    assert all(torch.equal(room, first) for room in out)


def test_streams_and_graphs_share_neither_flags_nor_parts() -> None:
    calls = [call(SIMPLE["few"], tiles, seed) for seed, tiles in enumerate(TILES.values())]
    expected = [results(made)[0] for made in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for made in calls[2:] * 2:
            made.run()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(10):
        for stream, made in zip(streams[:2], calls[:2], strict=True):
            with torch.cuda.stream(stream):
                made.run()
        with torch.cuda.stream(streams[2]):
            graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(made.d.room, room) for made, room in zip(calls, expected, strict=True))
