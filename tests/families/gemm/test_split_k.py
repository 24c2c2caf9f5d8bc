"""split_k: the emitted walk takes every k tile once; what is launched, stored and chosen."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from host import build, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import ColumnSum
from warploom.generator.families import family
from warploom.generator.families._product.launch import parts_at_once, tiles
from warploom.generator.families.gemm import GemmOperation, GemmProblem, GemmSchedule, GemmShape
from warploom.generator.families.gemm.constants import START
from warploom.generator.families.gemm.tailored import tailored
from warploom.generator.launches import DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import choose, portfolio

GEMM = family("gemm")
HARNESS = Path(__file__).with_name("parts.cpp")
STUBS = """
#include <set>
using std::max, std::min;
#define __device__
#define __forceinline__ inline
struct Parameters { int k_parts; };
"""
BF16 = GemmOperation("bf16", "bf16", "bf16")
ALONE = GemmSchedule((64, 64, 64), 10, consumers=1, split_k=10)
PAIR = GemmSchedule((128, 256, 64), 4, (2, 1), split_k=3)
H200 = DeviceLimits(132, "NVIDIA H200")


def spec(schedule: GemmSchedule, operation: GemmOperation = BF16) -> KernelSpec:
    return KernelSpec("sm_90a", operation, schedule)


def problem(m: int, n: int, k: int) -> GemmProblem:
    return GemmProblem(m, n, k, k, k, n)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = re.findall(r"^struct (?:Unit|Walk) \{.*?^\};", render(spec(PAIR)), re.M | re.S)
    assert len(found) == 2
    text = "\n".join((STUBS, *found, f'#line 1 "{HARNESS}"', HARNESS.read_text()))
    return build(text, tmp_path_factory.mktemp("parts"))


@needs_compiler
@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 32), st.integers(1, 40), st.integers(0, 90), st.integers(1, 140)),
        min_size=1,
        max_size=20,
    )
)
def test_the_emitted_walk_takes_every_k_tile_once(
    program: Path, cases: list[tuple[int, int, int, int]]
) -> None:
    lines = "\n".join(f"{p} {count} {p + more} {many}" for p, count, more, many in cases)
    done = subprocess.run([program], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_second_launch_has_all_of_d_and_comes_before_sums_of_columns() -> None:
    summed = replace(BF16, epilogue=(ColumnSum(),))
    for schedule in (ALONE, PAIR):
        one, at = spec(schedule, summed), problem(300, 600, 16_376)
        first, second, third = GEMM.launches(one, at, H200)
        assert (first.entry, second.entry) == (one.name, f"{one.name}_reduction")
        assert third.entry == f"{one.name}_column_sum_0"
        m, n, _ = schedule.tile
        padded = tiles(schedule, at) * schedule.multicast * m * n
        assert second.grid * 64 * GEMM.layout(one).chunk_columns == padded
        assert (second.block, second.cluster, second.early) == (128, 1, True)
        assert second.shared_bytes == 2 * 64 * 2 * GEMM.layout(one).chunk_columns
        rooms = {room.tensor: room for room in GEMM.workspaces(one, at)}
        assert rooms["partial_tiles"].bytes == 4 * padded * schedule.split_k
        assert not rooms["partial_tiles"].kept
        assert first.grid == min(132, tiles(schedule, at) * schedule.multicast * schedule.split_k)


def test_there_are_no_more_parts_than_k_tiles() -> None:
    for k, parts in ((1, 1), (64, 1), (65, 2), (64 * 10, 10), (64 * 100, 10)):
        at = problem(64, 64, k)
        first, second = GEMM.launches(spec(ALONE), at, H200)
        assert first.parameters["k_parts"] == parts
        assert (first.grid, second.grid) == (parts, 4)
        (room,) = GEMM.workspaces(spec(ALONE), at)
        assert room.bytes == parts * 4 * 64 * 64


def test_k_is_shared_in_one_way_by_consumers_that_share_a_tile() -> None:
    for wrong in (
        {"cluster_split_k": 2},
        {"stream_k": True},
        {"kernel_schedule": "pingpong", "consumers": 2},
    ):
        with pytest.raises(SpecificationError, match="split_k 10 with"):
            spec(replace(ALONE, tile=(64, 64, 64), **wrong))  # type: ignore[arg-type]
    with pytest.raises(SpecificationError, match="split_k 33"):
        spec(replace(ALONE, split_k=33))


def test_more_blocks_that_add_up_than_32_bits_count_are_refused() -> None:
    with pytest.raises(ProblemError, match="blocks that add up parts of k"):
        GEMM.launches(spec(PAIR), problem(2**22, 2**21, 4096), H200)


def test_few_tiles_of_a_long_k_are_split_and_others_are_not() -> None:
    def seconds(schedule: GemmSchedule, shape: GemmShape) -> float:
        return GEMM.seconds(START, BF16, schedule, shape, 132)

    few, many = GemmShape(165, 176, 16_376), GemmShape(4096, 4096, 4096)
    whole = replace(ALONE, split_k=1)
    assert seconds(ALONE, few) < 0.5 * seconds(whole, few)
    assert seconds(PAIR, many) > 1.1 * seconds(replace(PAIR, split_k=1), many)
    assert GEMM.table.suits(ALONE, few)
    assert not GEMM.table.suits(ALONE, many)  # tiles for every block
    assert not GEMM.table.suits(ALONE, replace(few, k=64 * 79))  # parts of less than 8 k tiles
    assert GEMM.table.suits(whole, many)


def test_what_is_tailored_to_few_tiles_fills_a_wave_with_parts() -> None:
    shape = GemmShape(165, 176, 16_376)
    found = [one for one in tailored(BF16, shape, H200) if one.split_k > 1]
    assert {one.swap_ab for one in found} == {False, True}
    for one in found:
        clusters, count = H200.clusters(one.cluster_size), tiles(one, shape)
        assert count * one.split_k <= clusters
        assert one.split_k == 24 or count * (one.split_k + 1) > clusters
    assert not [one for one in tailored(BF16, GemmShape(4096, 4096, 512), H200) if one.split_k > 1]


def test_a_thread_reads_as_many_parts_at_a_time_as_the_model_says() -> None:
    for one in (spec(ALONE), spec(PAIR), spec(replace(PAIR, store="direct"))):
        text, layout = render(one), GEMM.layout(one)
        at_once = re.search(r"kParts = \d+, kAtOnce = (\d+);", text)
        assert at_once and int(at_once[1]) == parts_at_once(layout) == 8


def test_parts_cost_rounds_of_reads_and_what_they_write() -> None:
    def seconds(values: dict[str, float], parts: int, shape: GemmShape) -> float:
        return GEMM.seconds(values, BF16, replace(ALONE, split_k=parts), shape, 132)

    few, slow = GemmShape(64, 64, 64 * 240), START | {"reduction_round": 1.0}
    for parts, rounds in ((8, 1), (10, 2), (16, 2), (24, 3)):
        assert seconds(slow, parts, few) == pytest.approx(rounds, abs=1e-3)
    more = seconds(START | {"written": 1e9}, 8, few) - seconds(START, 8, few)
    assert more >= 8 * 4 * 64 * 64 / 1e9  # the first launch writes all parts


def test_the_model_chooses_how_many_parts_a_row_of_the_table_has() -> None:
    device = DeviceLimits(132, "NVIDIA H200", "13.0")
    few, many = GemmShape(165, 176, 16_376), GemmShape(4096, 4096, 4096)

    def listed(shape: GemmShape) -> list[GemmSchedule]:
        found = [one.schedule for one in portfolio(BF16, shape, device, "tma")]
        return [one for one in found if isinstance(one, GemmSchedule) and one.split_k > 1]

    assert not listed(many)
    assert len({replace(one, split_k=1) for one in listed(few)}) > 10
    for tiled in {replace(one, split_k=1) for one in listed(few)}:
        parts = [one.split_k for one in listed(few) if replace(one, split_k=1) == tiled]
        blocks = tiles(tiled, few) * tiled.multicast
        assert parts == [n for n in (2, 3, 4, 5, 6, 8, 12, 16, 24) if blocks * n <= 144]
    chosen = choose(BF16, few, device=device, requires="tma").spec.schedule
    assert isinstance(chosen, GemmSchedule) and chosen in listed(few)
