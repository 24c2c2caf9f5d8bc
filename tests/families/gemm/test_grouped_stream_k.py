"""Grouped GEMMs whose CTAs share the k tiles of all groups that have rows: who multiplies what."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped_operands import ENDS, offsets, operands
from grouped_walk import Unit, Walk, exchange_of, tiles_of
from host import build, definitions, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended_gpu import PretendedGpu, gpu

import warploom
from warploom.errors import SpecificationError
from warploom.generator.families._product.groups import FEW_WAVES
from warploom.generator.families.gemm import GemmOperation, GemmProblem, complete
from warploom.generator.families.gemm.launch import launches, workspaces
from warploom.generator.launches import DeviceLimits
from warploom.generator.render import render
from warploom.generator.shapes import LARGEST
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec

__all__ = ["gpu"]

H200 = DeviceLimits(132)


def spec(
    tile: tuple[int, int, int] = (32, 128, 64), groups: str = "rows", **fields: Any
) -> KernelSpec:
    """A kernel of few rows in bf16, or of what `fields` say."""
    layouts: Any = ("col", "row") if groups == "k" else ("row", "col")
    operation = GemmOperation(
        *("bf16", "bf16", "bf16", *layouts),
        batched=True,
        groups=groups,  # type: ignore[arg-type]
    )
    schedule = {"tile": tile, "swap_ab": True, "stream_k": True, **fields}
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, schedule))


FEW = spec()
SPECS = {
    "32x128": FEW,
    "16x64": spec((16, 64, 64), consumers=1),
    "128x128, clusters": spec((128, 128, 64), swap_ab=False, cluster=(2, 1)),
    "masked": spec(groups="masked"),
}


def problem(rows: int, groups: int, n: int, k: int) -> GemmProblem:
    return GemmProblem(rows, n, k, k, k, n, batches=groups)


def launched(kernel: KernelSpec, of: GemmProblem, device: DeviceLimits) -> tuple[int, int]:
    """How many clusters are launched, and below how many tiles they may cut all."""
    (launch,) = launches(kernel, of, device)
    assert "cut" not in launch.parameters  # only the device knows it
    few = launch.parameters["few_tiles"]
    assert isinstance(few, int)
    return launch.grid // kernel.schedule.cluster_size, few  # type: ignore[attr-defined]


# ---- Who multiplies what -------------------------------------------------------------------------


def check(walk: Walk) -> None:
    """Every k tile of every tile is multiplied once, and every part of a tile is added once.

    A cluster leaves its only part before it waits for others, all of which come before it: one that
    waits for a part that nobody leaves, or for a cluster that has not started, waits for ever.
    """
    times = [[0] * walk.k_tiles for _ in range(walk.tiles)]
    left: dict[int, Unit] = {}
    finished: dict[int, tuple[int, Unit]] = {}
    for cluster in range(walk.clusters):
        waits = False
        for unit in walk.units(cluster):
            assert 0 <= unit.begin < unit.end <= walk.k_tiles
            for k_tile in range(unit.begin, unit.end):
                times[unit.tile][k_tile] += 1
            if unit.end == walk.k_tiles:
                waits = waits or unit.begin > 0
                assert unit.tile not in finished
                finished[unit.tile] = cluster, unit
                continue
            assert cluster not in left and not waits
            left[cluster] = unit
    assert all(count == 1 for tile in times for count in tile)
    taken: list[int] = []
    for tile, (cluster, unit) in finished.items():
        if unit.begin == 0:
            continue
        reached = 0  # of k, in whose order parts are added
        for other in range(walk.first(tile), cluster):
            assert (left[other].tile, left[other].begin) == (tile, reached)
            reached = left[other].end
            taken.append(other)
        assert reached == unit.begin
    assert sorted(taken) == sorted(left)


@st.composite
def counts(draw: st.DrawFn) -> list[int]:
    """Rows of each group, many of which have none: of a few tokens, or of one group alone."""
    groups = draw(st.integers(1, 200))
    most = draw(st.sampled_from((1, 3, 33, 300)))
    share = draw(st.sampled_from((0.05, 0.5, 1.0)))
    random = draw(st.randoms(use_true_random=False))
    found = [random.randint(1, most) if random.random() < share else 0 for _ in range(groups)]
    if draw(st.booleans()):
        found[random.randrange(groups)] += draw(st.integers(0, 2000))
    return found


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(SPECS)),
    counts(),
    st.integers(1, 700),
    st.one_of(st.integers(1, 9000), st.just(2880)),
    st.integers(0, 50),
    st.integers(1, 150),
)
def test_every_k_tile_of_every_group_is_multiplied_once(
    name: str, rows: list[int], n: int, k: int, more: int, multiprocessors: int
) -> None:
    """Of any offsets, within what was launched and allocated for all of them; `more` rows have no
    group.
    """
    kernel = SPECS[name]
    masked = kernel.operation.groups == "masked"  # type: ignore[attr-defined]
    most = (max(rows) + more) * len(rows) if masked else sum(rows) + more
    of, device = problem(max(most, 1), len(rows), n, k), DeviceLimits(multiprocessors)
    clusters, few = launched(kernel, of, device)
    walk = Walk(few, exchange_of(kernel), tiles_of(kernel, n, rows), -(-k // 64), clusters)
    check(walk)
    schedule: Any = kernel.schedule
    sizes = {one.tensor: one.bytes for one in workspaces(kernel, of)}
    if walk.cut:
        size = schedule.cluster_size
        assert walk.ranges * size * 4 * schedule.tile[0] * schedule.tile[1] <= sizes["parts"]
        assert walk.ranges * size * 4 * schedule.consumers * 4 <= sizes["raised"]


def test_a_token_of_eight_experts_takes_all_sms() -> None:
    """Qwen3-30B-A3B: 96 tiles of gate and up on 132 SMs; 128 of down, which stay whole."""
    clusters, few = launched(FEW, problem(8, 128, 1536, 2048), H200)
    up = Walk(few, exchange_of(FEW), tiles_of(FEW, 1536, [1] * 8), 32, clusters)
    assert (up.tiles, clusters, up.cut, up.ranges) == (96, 132, 96, 132)
    assert max(up.start(one + 1) - up.start(one) for one in range(132)) == 24  # of 32
    clusters, few = launched(FEW, problem(8, 128, 2048, 768), H200)
    down = Walk(few, exchange_of(FEW), tiles_of(FEW, 2048, [1] * 8), 12, clusters)
    assert (down.tiles, down.cut) == (128, 0)


def test_tiles_are_whole_where_an_exchange_takes_as_long() -> None:
    """Of 128x256 it takes 10 us, which is 12 of its k tiles."""
    large = spec((128, 256, 64), swap_ab=False)
    assert (exchange_of(FEW), exchange_of(large)) == (5, 12)
    for exchange, cut in ((5, 96), (7, 96), (8, 0)):  # 24 k tiles instead of 32
        assert Walk(4 * 132, exchange, 96, 32, 132).cut == cut
    assert Walk(4 * 132, 5, 132 * 7, 32, 132).cut == 0  # whole waves
    assert Walk(4 * 132, 5, 132 * 7 + 1, 32, 132).cut == 133


def test_nothing_is_cut_that_32_bits_do_not_count() -> None:
    assert launched(FEW, problem(8, 8, 128, 64), H200)[1] > 0
    most = LARGEST // (FEW_WAVES * 132 * 132)  # k tiles
    assert launched(FEW, problem(8, 8, 1536, 64 * most), H200) == (132, 4 * 132)
    assert launched(FEW, problem(8, 8, 1536, 64 * most + 1), H200)[1] == 0
    check(Walk(0, 5, 96, 3, 132))


HARNESS = """
int main() {
  Parameters p;
  int tiles, k_tiles, clusters;
  while (std::scanf("%d %d %d %d", &p.few_tiles, &tiles, &k_tiles, &clusters) == 4) {
    for (int cluster = 0; cluster < clusters; ++cluster) {
      Walk walk(p, tiles, k_tiles, cluster, clusters);
      for (Unit unit; walk.next(unit);) {
        const int first = unit.end == k_tiles && unit.begin > 0 ? walk.first(unit.tile) : -1;
        std::printf("%d %d %d %d %d ", cluster, unit.tile, unit.begin, unit.end, first);
      }
    }
    std::puts("");
  }
}
"""
STUBS = """
using std::max, std::min;
#define __device__
#define __forceinline__ inline
struct Parameters { int few_tiles; };
"""


@needs_compiler
def test_the_emitted_walk_is_that_of_the_model(tmp_path: Path) -> None:
    parts = definitions(render(FEW), "Unit", "Walk")
    assert len(parts) == 2
    program = build("\n".join((STUBS, *parts, HARNESS)), tmp_path)
    walks = [
        Walk(few, exchange_of(FEW), tiles, k_tiles, clusters)
        for clusters in (1, 3, 20, 132)
        for k_tiles in (1, 7, 32, 45, 100)
        for tiles in (0, 1, 2, 5, 19, 96, 131, 132, 133, 527, 528, 529, 1000)
        for few in (0, FEW_WAVES * clusters)
    ]
    most = LARGEST // (FEW_WAVES * 132 * 132)
    walks.append(Walk(FEW_WAVES * 132, exchange_of(FEW), 527, most, 132))  # a sum beyond 32 bits?
    text = "\n".join(f"{one.few} {one.tiles} {one.k_tiles} {one.clusters}" for one in walks)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "a sum beyond 32 bits"
    for walk, line in zip(walks, done.stdout.splitlines(), strict=True):
        expected: list[int] = []
        for cluster in range(walk.clusters):
            for unit in walk.units(cluster):
                adds = unit.end == walk.k_tiles and unit.begin > 0
                first = walk.first(unit.tile) if adds else -1
                expected += [cluster, unit.tile, unit.begin, unit.end, first]
        assert [int(number) for number in line.split()] == expected, walk
        if walk.k_tiles <= 100:
            check(walk)


# ---- Kernels, launches, calls --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"groups": "k", "swap_ab": False}, "stream_k with groups k: must be false"),
        ({"cluster_split_k": 2}, "split_k 1, cluster_split_k 2 with groups rows: .* use stream_k"),
        ({"split_k": 2, "stream_k": False}, "split_k 2, cluster_split_k 1 with groups rows"),
        ({"kernel_schedule": "pingpong"}, "stream_k with kernel_schedule pingpong"),
        ({"producer_registers": 24}, "producer_registers 24 with stream_k, groups rows: must be"),
    ],
    ids=str,
)
def test_what_cannot_share_k_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecificationError, match=told):
        spec(**fields)


def test_a_launch_is_the_same_whatever_the_offsets_are() -> None:
    """A captured graph replays it: each of 8 rows may have a group to itself."""
    assert launched(FEW, problem(8, 128, 1536, 2048), H200) == (132, FEW_WAVES * 132)
    assert launched(FEW, problem(1, 128, 128, 2048), H200)[0] == 16  # parts of a tile at most
    assert launched(FEW, problem(300, 128, 1536, 2048), H200)[0] == 132
    masked = SPECS["masked"]
    assert launched(masked, problem(128, 128, 1536, 2048), H200)[0] == 132
    sizes = {one.tensor: (one.bytes, one.kept) for one in workspaces(FEW, problem(8, 8, 128, 64))}
    clusters = 8 * 16  # 8 tiles at most, of 16 parts at most
    assert sizes == {
        "parts": (clusters * 4 * 32 * 128, False),
        "raised": (clusters * 4 * 8, True),  # a flag for each warp
    }


def test_a_call_hands_over_flags_and_parts(gpu: PretendedGpu) -> None:
    a, w = operands()
    ends = offsets(*ENDS)
    bias = torch.ones(len(ENDS), w.shape[1], dtype=a.dtype)
    for _ in range(2):
        warploom.grouped_gemm(a, w.mT, offs=ends, spec=FEW)
    assert gpu.launches[-1]["offsets"] == ends.data_ptr()
    with pytest.raises(warploom.WarploomError, match="spec"):  # of another operation
        warploom.grouped_gemm(a, w.mT, offs=ends, bias=bias, spec=FEW)


def test_the_tuner_tries_shared_k_tiles_where_groups_have_few_rows() -> None:
    """The default table leaves them to it: no measurement says yet where they are faster."""
    path = Path(__file__).parents[3] / "configs" / "gemm" / "space_grouped.yaml"
    streamed = [one for one in expand_file(path).specs if one.schedule.stream_k]  # type: ignore[attr-defined]
    assert {one.operation.a for one in streamed} == {"bf16", "e4m3"}  # type: ignore[attr-defined]
    assert {one.schedule.swap_ab for one in streamed} == {True}  # type: ignore[attr-defined]
