"""Stream-K: which tiles are cut, and that the emitted walk of clusters takes every k tile once."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from host import build, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.generator.families import family
from warploom.generator.families._product.launch import MOST_PARTS, cut
from warploom.generator.families.gemm import GemmOperation, GemmProblem, GemmSchedule, GemmShape
from warploom.generator.launches import DeviceLimits
from warploom.generator.render import render
from warploom.generator.shapes import LARGEST
from warploom.generator.specification import KernelSpec

GEMM = family("gemm")
HARNESS = Path(__file__).with_name("walk.cpp")
STUBS = """
using std::max, std::min;
#define __device__
#define __forceinline__ inline
struct Parameters { int cut; };
"""
BF16 = GemmOperation("bf16", "bf16", "bf16")
PAIR = GemmSchedule((128, 256, 64), 4, (2, 1), stream_k=True)
SPLIT = GemmSchedule((64, 256, 64), 5, consumers=1, cluster_split_k=8, stream_k=True)
SCHEDULES = (PAIR, SPLIT, replace(PAIR, tile=(128, 128, 64), cluster=(1, 1)))
H200 = DeviceLimits(132)


def text() -> str:
    found = re.findall(
        r"^struct (?:Unit|Walk) \{.*?^\};", render(KernelSpec("sm_90a", BF16, PAIR)), re.M | re.S
    )
    assert len(found) == 2
    return "\n".join((STUBS, *found, f'#line 1 "{HARNESS}"', HARNESS.read_text()))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(text(), tmp_path_factory.mktemp("walk"))


def walk(program: Path, *cases: tuple[int, int, int, int]) -> None:
    lines = "\n".join(" ".join(map(str, case)) for case in cases)
    done = subprocess.run([program], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout or "a sum beyond 32 bits"


@needs_compiler
def test_every_small_division_takes_each_k_tile_once(program: Path) -> None:
    walk(
        program,
        *(
            (cut_tiles, tiles, k_tiles, clusters)
            for clusters in (1, 2, 3, 5, 8)
            for tiles in (1, 2, 3, 7, 8, 9, 16, 17)
            for cut_tiles in {0, 1, tiles // 2, tiles}
            for k_tiles in (1, 2, 3, 7, 16)
            if cut_tiles * k_tiles >= clusters or cut_tiles == 0
        ),
    )


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(SCHEDULES),
    st.builds(GemmShape, *(st.integers(1, most) for most in (3000, 9000, 40_000))),
    st.integers(1, 132),
)
def test_the_walk_of_what_is_launched_takes_each_k_tile_once(
    program: Path, schedule: GemmSchedule, shape: GemmShape, multiprocessors: int
) -> None:
    found = cut(schedule, shape, DeviceLimits(multiprocessors))
    walk(program, (found.tiles, found.all_tiles, found.k_tiles, found.clusters))


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(SCHEDULES),
    st.builds(GemmShape, *(st.integers(1, most) for most in (5000, 200_000, 500_000))),
    st.integers(1, 200),
)
def test_a_cut_is_worth_it_and_its_parts_have_room(
    schedule: GemmSchedule, shape: GemmShape, multiprocessors: int
) -> None:
    device = DeviceLimits(multiprocessors)
    found, whole = (
        cut(one, shape, device) for one in (schedule, replace(schedule, stream_k=False))
    )
    assert found.all_tiles == whole.all_tiles
    assert whole.tiles == 0
    if found.tiles == 0:
        assert found == whole
        return
    assert whole.busiest - found.busiest >= found.lost > 0
    assert found.tiles * found.k_tiles * found.clusters <= LARGEST
    assert found.tiles * found.k_tiles >= found.clusters  # or a range is empty
    assert found.clusters <= MOST_PARTS * found.tiles
    grid, rooms = found.clusters * schedule.cluster_size, rooms_of(schedule, shape)
    m, n, _ = schedule.tile
    assert rooms["parts"] >= grid * 4 * m * n // schedule.cluster_split_k
    assert rooms["raised"] >= grid * 4 * schedule.consumers * 4  # a flag for each warp


def test_whole_waves_and_products_of_few_k_tiles_are_not_cut() -> None:
    for shape in ((256 * 11, 256 * 6, 8192), (256 * 11, 256 * 12, 8192), (256 * 6, 2560, 448)):
        assert cut(PAIR, GemmShape(*shape), H200).tiles == 0
    assert cut(PAIR, GemmShape(256 * 11, 256 * 6 + 1, 8192), H200).tiles == 77


def test_what_a_wave_and_a_bit_leave_is_shared_by_all() -> None:
    found = cut(PAIR, GemmShape(5000, 5000, 5000), H200)  # 400 tiles on 66 clusters: 6 waves and 4
    assert (found.tiles, found.clusters, found.parts) == (70, 66, 2)
    assert found.busiest == 5 * 79 + 84  # of 7 * 79
    few = cut(SPLIT, GemmShape(48, 256, 100_000), H200)
    assert (few.tiles, few.clusters, few.parts) == (1, 15, 15)
    assert few.busiest == 14  # of 196


def test_tiles_are_cut_alike_where_that_leaves_few_clusters_idle() -> None:
    """At different k of the same rows, each reads for itself what all would read at once.

    Of 192x8192x27648, 128 tiles on 132 multiprocessors took 181 us cut and 151 whole.
    """
    alone, shape = SCHEDULES[2], GemmShape(1024, 1024, 8192)
    found = cut(alone, shape, H200)  # 64 tiles on 132
    assert (found.tiles, found.clusters, found.aligned) == (64, 128, True)
    assert not cut(alone, replace(shape, n=1280), H200).aligned  # 80: else none would be cut
    assert cut(alone, replace(shape, n=2048, k=30_000), H200).tiles == 0  # 128


def test_more_than_32_bits_of_k_tiles_are_not_cut() -> None:
    most = LARGEST // (65 * 65)  # k tiles of 65 tiles on as many clusters
    shape = GemmShape(256, 256, 64 * most, batches=33)  # cut alike: 33 tiles on 66
    assert cut(PAIR, shape, H200).tiles == 33
    assert cut(PAIR, replace(shape, k=2 * shape.k), H200).tiles == 0


def rooms_of(schedule: GemmSchedule, shape: GemmShape) -> dict[str, int]:
    """The bytes of each workspace."""
    spec = KernelSpec("sm_90a", BF16, schedule)
    problem = GemmProblem(shape.m, shape.n, shape.k, shape.k, shape.k, shape.n)
    found = GEMM.workspaces(spec, problem)
    assert {room.tensor: room.kept for room in found} == {"parts": False, "raised": True}
    return {room.tensor: room.bytes for room in found}
