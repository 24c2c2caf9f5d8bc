"""Parts of k that a second launch adds up: every element, the same bits in every run and graph."""

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
from warploom.generator.families.gemm import GemmOperation, GemmSchedule
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
# Rows and columns in tiles, k in k tiles, each for every part: beside whole tiles, prime ones.
SHAPES: dict[str, tuple[float, float, float]] = {
    "a part has one k tile": (1, 1, 1),
    "fewer k tiles than parts": (1, 1, 0.5),
    "parts of different length": (1.7, 2.3, 3.4),
    "more parts than multiprocessors": (9.1, 11.3, 2.2),
    "long": (0.4, 1.2, 40.3),
}
over_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
over_kernels = pytest.mark.parametrize("kernel", wider.REDUCED, ids=short)
SIMPLE = wider.REDUCED[0]


@pytest.fixture(scope="module", autouse=True)
def built(build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]]) -> None:
    artifacts = build(wider.REDUCED)
    used = [one for artifact in artifacts.values() for one in artifact.resources.values()]
    assert len(used) >= 2 * len(artifacts)
    assert all(one.spill_bytes == one.local_bytes == 0 for one in used)
    assert [one.name for one in artifacts.values() if one.serialised] == []


def call(kernel: KernelSpec, shape: tuple[float, float, float], seed: int = 0) -> arena.Call:
    """A call of so many tiles, and of k tiles for each part, the last of them ragged."""
    operation = cast("GemmOperation", kernel.operation)
    schedule = cast("GemmSchedule", kernel.schedule)
    tile_m, tile_n, tile_k = schedule.tile
    rows, columns = tile_m * schedule.cluster[0], tile_n * schedule.cluster[1]
    units = (rows, columns, tile_k * schedule.split_k)
    m, n, k = (max(1, int(many * unit) - 3) for many, unit in zip(shape, units, strict=True))
    batches = ((2,), (2,)) if operation.batched else ((), ())
    m, n, k = cases.fitting((m, n, k), kernel)
    return arena.call(kernel, m, n, k, seed=seed, batches=batches)


def results(made: arena.Call) -> list[torch.Tensor]:
    """What a call stores, once more."""
    arena.clear(made)
    made.d.room.fill_(-1)
    made.run()
    return [output.room.clone() for output in (made.d, *made.outputs)]


@over_shapes
@over_kernels
def test_no_part_of_k_is_lost_or_added_twice(
    kernel: KernelSpec, shape: tuple[float, float, float]
) -> None:
    made = call(kernel, shape)
    arena.verify(made)
    first = results(made)
    for _ in range(4):
        assert all(map(torch.equal, results(made), first))


def test_a_hundred_launches_behind_each_other_have_the_same_bits() -> None:
    """Each begins while the one before adds up, and finds its memory in use until that is done."""
    made = call(SIMPLE, SHAPES["long"])
    first = results(made)[0]
    out = [torch.empty_like(made.d.room) for _ in range(100)]
    for room in out:
        made.run()
        room.copy_(made.d.room)
    assert all(torch.equal(room, first) for room in out)


def test_streams_do_not_share_parts() -> None:
    calls = [call(SIMPLE, shape, seed) for seed, shape in enumerate(SHAPES.values())]
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


def test_captured_launches_replay() -> None:
    calls = [call(SIMPLE, shape, seed) for seed, shape in enumerate(SHAPES.values())]
    expected = [results(made)[0] for made in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for made in calls * 2:
            made.run()
    for made in calls:
        made.d.room.fill_(-1)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(made.d.room, room) for made, room in zip(calls, expected, strict=True))
