"""The model of products: its arithmetic holds for what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.families.gemm import model as gemm
from warploom.generator.families.gemm.model import START, Tiling, seconds
from warploom.generator.model.arithmetic import slowest
from warploom.generator.model.constants import shipped

BF16 = GemmOperation("bf16", "bf16", "bf16")
PINGPONG = GemmSchedule((128, 128, 64), 6, (2, 1), kernel_schedule="pingpong")
COOPERATIVE = GemmSchedule((128, 256, 64), 4, (2, 1))


def time(schedule: GemmSchedule, m: int, n: int, k: int, count: int = 132) -> float:
    return seconds(START, BF16, schedule, GemmShape(m, n, k), count)


@pytest.mark.parametrize(
    ("schedule", "shape", "waves", "bands"),
    [
        (PINGPONG, (4096, 4096, 64), 8, 2),  # 16 x 32 clusters on 66: 7.76 rounds; 16 / 8 bands
        (PINGPONG, (256, 128, 64), 1, 1),
        (PINGPONG, (257, 128, 64), 1, 1),  # one row more is one cluster more
        (replace(PINGPONG, cluster=(1, 1)), (128 * 133, 128, 64), 2, 17),  # one tile too many
        (replace(PINGPONG, cluster=(1, 1)), (128 * 132, 128, 64), 1, 17),
        (replace(PINGPONG, raster="along_n"), (4096, 4096, 64), 8, 4),
    ],
)
def test_waves_and_bands_are_those_of_the_kernels_scheduler(
    schedule: GemmSchedule, shape: tuple[int, int, int], waves: int, bands: int
) -> None:
    found = Tiling.of(schedule, GemmShape(*shape), 132)
    assert (found.waves, found.bands) == (waves, bands)


def test_blocks_and_busy_multiprocessors() -> None:
    schedule = replace(PINGPONG, cluster=(1, 1))
    tail = Tiling.of(schedule, GemmShape(128 * 198, 128, 64), 132)
    assert (tail.blocks, tail.busy) == (132, 0.75)
    few = Tiling.of(PINGPONG, GemmShape(128 * 65, 128, 64), 132)
    assert (few.blocks, few.busy) == (66, 0.5)


def test_blocks_that_share_k_are_more_blocks_of_fewer_steps() -> None:
    shared = GemmSchedule((64, 96, 64), 11, consumers=1, cluster_split_k=4)
    tiling = Tiling.of(shared, GemmShape(64, 1280, 8192), 132)
    assert (tiling.waves, tiling.blocks, tiling.busy) == (1, 56, 56 / 132)
    assert Tiling.of(shared, GemmShape(64, 96 * 30, 8192), 132).waves == 1
    assert Tiling.of(shared, GemmShape(64, 96 * 31, 8192), 132).waves == 2  # 30 run at a time
    alone = replace(shared, cluster_split_k=1)
    assert time(shared, 64, 1280, 8192) < 0.6 * time(alone, 64, 1280, 8192)
    assert time(shared, 64, 1280, 256) > time(alone, 64, 1280, 256) + START["exchange"] / 2
    assert time(shared, 64, 96 * 132, 8192) > time(alone, 64, 96 * 132, 8192)


def test_a_tail_costs_a_wave_and_no_more() -> None:
    full = replace(PINGPONG, cluster=(1, 1))
    one, tail = time(full, 128 * 12, 128 * 11, 8192), time(full, 128 * 12, 128 * 12, 8192)
    fixed = START["launch"] + START["latency"]
    assert (tail - fixed) / (one - fixed) == pytest.approx(2, rel=0.15)


def test_large_products_are_bound_by_the_tensor_core() -> None:
    flops = 2 * 8192**3 / time(COOPERATIVE, 8192, 8192, 8192)
    # 132 multiprocessors, 4096 operations a cycle (PTX ISA: m64n256k16 in 128 cycles).
    peak = 132 * 4096 * START["tensor_clock"]
    assert 0.75 * peak < flops < peak


def test_few_rows_are_bound_by_the_bytes_of_the_weight() -> None:
    small = GemmSchedule((64, 64, 64), 12, consumers=1)
    moved = 28672 * 4096 * 2
    floor = moved / START["hbm_bandwidth"]
    assert floor < time(small, 16, 28672, 4096) < 1.35 * floor


def test_eight_bits_take_half_of_the_bytes_and_of_the_products() -> None:
    wide = time(COOPERATIVE, 4096, 4096, 4096)
    e4m3 = GemmOperation("e4m3", "e4m3", "bf16")
    schedule = replace(COOPERATIVE, tile=(128, 256, 128))
    narrow = seconds(START, e4m3, schedule, GemmShape(4096, 4096, 4096), 132)
    assert 0.5 < narrow / wide < 0.65


def test_multicast_saves_traffic_of_l2_and_promotion_and_epilogues_cost() -> None:
    slow = {**START, "l2_bandwidth": 4e10}
    shape = GemmShape(8192, 8192, 8192)

    def at(schedule: GemmSchedule, operation: GemmOperation = BF16) -> float:
        return seconds(slow, operation, schedule, shape, 132)

    assert at(PINGPONG) < 0.8 * at(replace(PINGPONG, cluster=(1, 1)))
    e4m3 = GemmOperation("e4m3", "e4m3", "bf16")
    schedule = GemmSchedule((128, 128, 128), 6)
    assert at(schedule, replace(e4m3, accumulation="promoted")) > at(schedule, e4m3)
    # A cooperative tile's epilogue is exposed for each tile, pingpong's for the last.
    base, free = START, {**START, "epilogue": 1e-12, "store_bandwidth": 1e18}
    cost = {
        roles: seconds(base, BF16, schedule, shape, 132) - seconds(free, BF16, schedule, shape, 132)
        for roles, schedule in (("pingpong", PINGPONG), ("cooperative", COOPERATIVE))
    }
    assert cost["cooperative"] > 5 * cost["pingpong"] > 0


def test_block_scales_take_time_in_which_nothing_multiplies_and_loads_go_on() -> None:
    promoted = GemmOperation("e4m3", "e4m3", "bf16", accumulation="promoted")
    block, row = (
        replace(promoted, block_scales="row_block"),
        replace(promoted, block_scales="row_row"),
    )
    schedule = GemmSchedule((256, 128, 128), 4)

    def at(operation: GemmOperation, schedule: GemmSchedule, *shape: int) -> float:
        return seconds(START, operation, schedule, GemmShape(*shape), 132)

    large = [at(one, schedule, 8192, 8192, 8192) for one in (promoted, block, row)]
    assert large[0] * 1.1 < large[1] < large[2] * 0.9
    few = GemmSchedule((16, 64, 128), 22, consumers=1, swap_ab=True)
    weight = [at(one, few, 16, 132 * 64, 8192) for one in (promoted, block)]
    assert weight[1] == pytest.approx(weight[0], rel=0.02)  # what is loaded decides
    swapped = replace(schedule, tile=(128, 256, 128), swap_ab=True)  # A's rows are its columns
    assert at(block, swapped, 8192, 8192, 8192) == pytest.approx(large[2], rel=0.01)


@pytest.mark.parametrize(
    ("shape", "measured"), [((4096, 4096, 4096), 121e-6), ((4096, 28672, 4096), 826e-6)], ids=str
)
def test_block_scaled_tiles_take_what_was_measured(
    shape: tuple[int, int, int], measured: float
) -> None:
    """On an H200, in a graph: the fit's launches are between events, and take 4.7 us more."""
    fitted = shipped("NVIDIA H200")
    assert fitted
    operation = GemmOperation(
        "e4m3", "e4m3", "bf16", accumulation="promoted", block_scales="row_block"
    )
    schedule, values = GemmSchedule((256, 128, 128), 3, (1, 2)), fitted.families["gemm"].values
    found = seconds(values, operation, schedule, GemmShape(*shape), 132)
    assert found - 4.7e-6 == pytest.approx(measured, rel=0.05)


def test_what_l2_does_not_keep_is_read_once_for_each_band() -> None:
    schedule = replace(PINGPONG, swizzle_size=4)
    shape = GemmShape(8192, 16384, 16384)
    a, b = (x * y * 2 for x, y in ((8192, 16384), (16384, 16384)))
    tiling = Tiling.of(schedule, shape, 132)
    assert tiling.bands == 8
    assert gemm._traffic(START, BF16, schedule, shape, tiling) == a + b + 7 * b
    kept = GemmShape(8192, 1024, 4096)  # 8 MB of B stay in L2
    once = 2 * (8192 * 4096 + 1024 * 4096)
    assert gemm._traffic(START, BF16, schedule, kept, Tiling.of(schedule, kept, 132)) == once


def test_a_tensor_core_is_slower_where_all_multiply() -> None:
    schedule = replace(COOPERATIVE, cluster=(1, 1))
    free = {**START, "l2_total": 1e15}
    few, all_ = (
        seconds(free, BF16, schedule, GemmShape(128 * count, 256, 8192), 132) for count in (13, 132)
    )
    assert 1 + 0.8 * START["power"] < all_ / few < 1 + 1.5 * START["power"]


def test_two_blocks_of_a_tpc_share_its_port_and_an_uneven_grid_waits_for_them() -> None:
    def weight(tile_n: int, n: int = 6144) -> float:
        return time(GemmSchedule((64, tile_n, 64), 10, consumers=1), 16, n, 4096)

    assert weight(48) < weight(96) < weight(64)  # 128, 64 and 96 blocks
    slow = {**START, "l2_bandwidth": 2e10}
    one, two = (
        seconds(slow, BF16, GemmSchedule((64, 64, 64), 10), GemmShape(64, 64 * count, 4096), 132)
        for count in (66, 67)
    )
    assert 1.8 < two / one < 2


def test_a_last_wave_of_few_blocks_has_less_of_memory() -> None:
    """28672 columns by 128 are 132 blocks and then 92; by 112 they are 132 and 124."""
    uneven = GemmSchedule((16, 128, 64), 12, consumers=1, swap_ab=True, l2_promotion=128)
    even = GemmSchedule((64, 112, 64), 10, consumers=1, l2_promotion=128)
    assert time(uneven, 4, 28672, 4096) > 1.02 * time(even, 4, 28672, 4096)
    assert gemm._pace(START, 132, 132) == 1
    assert gemm._pace(START, 92, 132) == pytest.approx(1 + START["uneven"] * 40 / 92)
    assert gemm._pace(START, 66, 132) == 1 + START["sparse"]


def test_no_block_loads_rows_of_a_past_the_end() -> None:
    single = GemmSchedule((64, 32, 64), 18, consumers=1)
    multicast = replace(single, cluster=(1, 2))
    for m in (16, 64):
        assert time(multicast, m, 4096, 4096) < 1.1 * time(single, m, 4096, 4096)
    assert gemm._loaded(64, 3) == 8
    assert gemm._loaded(64, 100) == 64


def test_rows_that_begin_within_lines_or_sectors_cost_more_to_load() -> None:
    """k = 78600 took 1.5 times what its neighbours do, by what L2 gives."""
    narrow = replace(COOPERATIVE, l2_promotion=128)
    whole, lines, sectors = (
        gemm._misfit(START, BF16, narrow, GemmShape(1024, 1600, k))
        for k in (4096, 4096 + 16, 4096 + 8)
    )
    assert whole == 1 < lines == 1 + START["misaligned"]
    assert sectors == lines + START["straddling"]
    overfetched = gemm._misfit(START, BF16, COOPERATIVE, GemmShape(1024, 1600, 4096 + 8))
    assert overfetched == sectors + START["overfetched"]
    columns = replace(BF16, layout_a="col")  # whose rows are of m
    assert gemm._misfit(START, columns, narrow, GemmShape(1024, 1600, 4096)) == 1
    assert gemm._misfit(START, columns, narrow, GemmShape(1032, 1600, 4096)) > 1


def test_swapped_tiles_that_are_stored_directly_cost_more() -> None:
    """Where D cannot be stored by TMA they were taken for as good as others."""
    swapped = GemmSchedule((128, 256, 64), 4, swap_ab=True)
    direct = replace(swapped, store="direct")
    assert time(direct, 4096, 4096, 512) > time(swapped, 4096, 4096, 512)


def test_tiles_that_end_within_sectors_cost_more_to_store() -> None:
    """2152x69736x168 takes 190 us by tiles of 256 columns, and 325 us by 112."""
    whole, within = GemmShape(2152, 69632, 168), GemmShape(2152, 69640, 168)
    narrow, wide = (replace(PINGPONG, tile=(128, tile_n, 64)) for tile_n in (128, 256))
    stored = [gemm._stored(START, BF16, one, within) for one in (narrow, wide)]
    assert stored[0] > 1.2 * stored[1] > 1.2 * gemm._stored(START, BF16, narrow, whole)
    assert gemm._stored(START, BF16, replace(wide, raster="along_n"), within) < stored[1]


def test_narrow_chunks_make_an_epilogue_longer() -> None:
    """A tile of 112 columns is finished by 16 columns at a time, one of 128 by 64."""
    odd, even = (replace(COOPERATIVE, tile=(128, tile_n, 64)) for tile_n in (112, 128))
    at = GemmShape(4096, 4096, 4096)
    assert gemm._chunks(BF16, odd, at) == 7 and gemm._chunks(BF16, even, at) == 2
    shared = replace(odd, tile=(64, 64, 64), consumers=1, cluster_split_k=8)
    assert gemm._chunks(BF16, shared, at) == 1  # of 8 columns


def test_a_weight_is_read_by_half_as_many_where_rows_share_a_cluster() -> None:
    apart = GemmSchedule((64, 64, 64), 13, consumers=1)
    together = replace(apart, cluster=(2, 1))
    assert time(together, 128, 4096, 14336) < 0.98 * time(apart, 128, 4096, 14336)


@pytest.mark.parametrize(
    ("cluster", "rows"), [((1, 1), 160), ((4, 1), 88), ((2, 4), 64), ((1, 8), 104)]
)
def test_each_block_of_a_cluster_loads_a_part_of_what_it_shares(
    cluster: tuple[int, int], rows: int
) -> None:
    schedule = GemmSchedule((64, 96, 64), 10, cluster, consumers=1)
    assert gemm._stage_bytes(schedule, GemmShape(1024, 3072, 4096)) == 128 * rows


def test_short_requests_suit_a_weight_of_few_rows() -> None:
    wide = GemmSchedule((64, 48, 64), 15, consumers=1)
    short = replace(wide, l2_promotion=128)
    assert 0.96 < time(short, 16, 6144, 4096) / time(wide, 16, 6144, 4096) < 0.99
    short = replace(COOPERATIVE, l2_promotion=128)
    assert time(short, 4096, 4096, 4096) == pytest.approx(time(COOPERATIVE, 4096, 4096, 4096), 1e-3)


def test_empty_products_cost_a_launch() -> None:
    assert time(PINGPONG, 0, 128, 128) == time(PINGPONG, 128, 128, 0) == START["launch"]


def test_slowest_is_the_largest_where_one_is() -> None:
    assert slowest(1.0, 0.1) == pytest.approx(1.0, rel=1e-4)
    assert slowest(1.0, 1.0) == pytest.approx(2**0.125)
