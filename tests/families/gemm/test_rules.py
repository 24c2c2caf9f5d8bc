"""Each rule holds at its limits, and says the value that breaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from warploom.generator import rules
from warploom.generator.architectures import architecture
from warploom.generator.epilogue import Bias, Residual
from warploom.generator.families import family
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, gemm_layout
from warploom.generator.families.gemm.schedule import Input, Output

ARCH = architecture("sm_90a")
OPERATION = GemmOperation("bf16", "bf16", "bf16")
SCHEDULE = GemmSchedule((128, 256, 64), 3)


def reasons(operation: GemmOperation = OPERATION, **schedule: Any) -> list[str]:
    return family("gemm").reasons(ARCH, operation, replace(SCHEDULE, **schedule))


def test_wgmma_takes_exactly_the_n_of_the_instruction_set() -> None:
    def legal(*, integer: bool) -> list[int]:
        return [n for n in range(-8, 300) if rules.wgmma_n("n", n, integer=integer) is None]

    assert legal(integer=False) == list(range(8, 257, 8))
    assert legal(integer=True) == [8, 16, 24, *range(32, 257, 16)]


def test_shared_memory_is_full_at_its_last_byte() -> None:
    assert rules.fits_shared(232_448, ARCH) is None
    assert "shared memory 232449 bytes: sm_90a gives a block 232448" in str(
        rules.fits_shared(232_449, ARCH)
    )


def test_registers_are_full_at_the_budget() -> None:
    assert rules.fits_registers(232, 232) is None
    assert str(rules.fits_registers(233, 232)).startswith("233 registers expected, 232 to have")


@pytest.mark.parametrize(("value", "good"), [(0, False), (-64, False), (96, False), (128, True)])
def test_a_multiple_is_positive(value: int, good: bool) -> None:
    assert (rules.multiple_of("m", value, 64) is None) is good


def test_more_epilogue_operands_make_narrower_chunks_before_they_are_refused() -> None:
    schedule = GemmSchedule(tile=(128, 256, 64), stages=2)
    light = GemmOperation("bf16", "bf16", "bf16", epilogue=(Bias("bf16"), Residual("bf16")))
    heavy = GemmOperation("bf16", "bf16", "bf16", epilogue=(Bias("fp32"), Residual("fp32")))
    assert gemm_layout(light, schedule).chunk_columns == 64
    assert gemm_layout(heavy, schedule).chunk_columns == 32
    assert gemm_layout(heavy, schedule).registers <= 232


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ({"stages": "3"}, "stages '3': must be an integer"),
        ({"stages": True}, "stages True: must be an integer"),
        ({"consumers": True}, "consumers True: must be one of 1, 2"),
        ({"swap_ab": 1}, "swap_ab 1: must be one of False, True"),
        ({"tile": (128, 256)}, "tile (128, 256): must be 3 integers"),
        ({"tile": [128, 256, 64]}, "tile [128, 256, 64]: must be 3 integers"),
    ],
)
def test_a_value_of_another_type_is_refused_although_it_may_be_equal(
    schedule: dict[str, Any], reason: str
) -> None:
    """Equal fields of two types would have one kernel and two digests."""
    assert reasons(**schedule) == [reason]


@pytest.mark.parametrize(
    ("a", "b", "mixes"),
    [("e4m3", "e5m2", True), ("fp16", "bf16", False), ("int8", "e4m3", False)],
)
def test_only_the_types_of_8_bit_floats_mix(a: Input, b: Input, mixes: bool) -> None:
    """wgmma would read the bits of one type as those of the other."""
    found = family("gemm").reasons(
        ARCH, GemmOperation(a, b, "fp32"), replace(SCHEDULE, tile=(128, 256, 128 if mixes else 64))
    )
    assert (found == []) is mixes
    assert mixes or found == [f"b {b}: must be of the type of a, {a}; only fp8 types mix"]


def test_a_schedule_of_the_table_is_legal() -> None:
    assert reasons() == []


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ({"tile": (192, 256, 64)}, "tile m 192: must be one of 64, 128, 256"),
        ({"tile": (128, 260, 64)}, "tile n 260: must be what wgmma takes: multiples of 8, at"),
        ({"tile": (128, 256, 32)}, "tile k 32: must be 64"),
        ({"cluster": (4, 4)}, "cluster (4, 4): must be one of (1, 1), (1, 2), (1, 4), (1, 8), (2"),
        ({"cluster": (3, 1)}, "cluster (3, 1): must be one of (1, 1), (1, 2), (1, 4), (1, 8), (2"),
        ({"stages": 1}, "stages 1: must be 2 to 32"),
        ({"stages": 33}, "stages 33: must be 2 to 32"),
        ({"swizzle_size": 0}, "swizzle_size 0: must be 1 to 1024"),
        ({"store": "global"}, "store 'global': must be one of tma, direct"),
        ({"raster": "along_k"}, "raster 'along_k': must be one of along_m, along_n"),
        ({"tile": (256, 192, 64), "swap_ab": True}, "tile n 192: must be one of 64, 128, 256"),
        ({"tile": (260, 64, 64), "swap_ab": True, "store": "direct"}, "tile m 260: must be what"),
        ({"tile": (24, 128, 64), "swap_ab": True}, "store tma, tile m 24: rows of staging"),
        ({"tile": (128, 64, 64), "swap_ab": True}, "tile n 64: must be a positive multiple of 128"),
        ({"tile": (256, 256, 64), "swap_ab": True, "stages": 2}, "312 registers expected, 232 to"),
        ({"producer_registers": 32}, "producer_registers 32: must be one of 24, 40"),
        ({"l2_promotion": 32}, "l2_promotion 32: must be one of 64, 128, 256"),
        ({"kernel_schedule": "solo"}, "kernel_schedule 'solo': must be one of cooperative"),
        ({"consumers": 3}, "consumers 3: must be one of 1, 2"),
        ({"tile": (64, 256, 64)}, "tile m 64: must be a positive multiple of 128 for 2 consumers"),
        ({"tile": (256, 256, 64), "stages": 2}, "296 registers expected, 232 to have"),
        ({"stages": 5}, "shared memory 279552 bytes: sm_90a gives a block 232448"),
        ({"cluster_split_k": 9, "tile": (128, 144, 64)}, "cluster_split_k 9: must be 1 to 8"),
        (
            {"cluster_split_k": 2, "cluster": (1, 2)},
            "cluster_split_k 2 with cluster (1, 2), kernel_schedule cooperative: takes",
        ),
        (
            {"cluster_split_k": 2, "cluster": (2, 4)},
            "cluster_split_k 2 with cluster (2, 4), kernel_schedule cooperative: takes",
        ),
        (
            {"cluster_split_k": 2, "kernel_schedule": "pingpong"},
            "cluster_split_k 2 with cluster (1, 1), kernel_schedule pingpong: takes",
        ),
        ({"cluster_split_k": 3}, "tile n 256: must be a positive multiple of 24"),
        (
            {"cluster_split_k": 2, "stages": 2},
            "cluster_split_k 2, stages 2: the 131072 bytes of a tile's sums lie",
        ),
    ],
)  # fmt: skip
def test_a_schedule_that_breaks_one_rule_is_told_that_rule(
    schedule: dict[str, Any], reason: str
) -> None:
    (found,) = reasons(**schedule)
    assert found.startswith(reason)


@pytest.mark.parametrize("d", ["fp32", "e4m3", "int8"])
def test_only_16_bit_results_are_turned_on_their_way_to_a_tma_store(d: Output) -> None:
    operation = GemmOperation("bf16", "bf16", d)
    swapped = {"tile": (16, 128, 64), "swap_ab": True}
    (found,) = reasons(operation, **swapped)
    assert found.startswith(f"store tma with swap_ab, d {d}: takes 16-bit types")
    assert found.endswith("use store direct")
    assert reasons(operation, **swapped, store="direct") == []


def test_promoted_sums_take_as_many_registers_again() -> None:
    fast = GemmOperation("e4m3", "e4m3", "bf16")
    promoted = replace(fast, accumulation="promoted")
    tile = {"tile": (128, 256, 128), "stages": 2}
    assert reasons(fast, **tile) == []
    (found,) = reasons(promoted, **tile)
    assert found.startswith("290 registers expected, 232 to have")
    registers = [
        gemm_layout(op, replace(SCHEDULE, tile=(128, 128, 128))).registers
        for op in (fast, promoted)
    ]
    assert registers[1] - registers[0] == 64
    for fields in ({"consumers": 1}, {"kernel_schedule": "pingpong"}):
        for tile in ({"tile": (256, 16, 128)}, {"tile": (16, 256, 128), "swap_ab": True}):
            assert reasons(fast, **tile, **fields) == []
            (found,) = reasons(promoted, **tile, **fields)
            assert "256 for 1 consumers sharing it: must be at most 128 each" in found


def test_what_the_producer_leaves_goes_to_two_consumers() -> None:
    budgets = {
        producer: gemm_layout(OPERATION, replace(SCHEDULE, producer_registers=producer))
        for producer in (24, 40)
    }
    assert {producer: found.register_budget for producer, found in budgets.items()} == {
        24: 240,
        40: 232,
    }


@pytest.mark.parametrize(
    "schedule",
    [{"tile": (64, 128, 64), "consumers": 1}, {"cluster": (2, 1)}, {"cluster": (1, 2)}],
    ids=["one consumer", "cluster along m", "cluster along n"],
)
def test_a_producer_with_few_registers_has_two_consumers_and_no_cluster(
    schedule: dict[str, Any],
) -> None:
    assert reasons(**schedule) == []
    (found,) = reasons(**schedule, producer_registers=24)
    assert found.startswith("producer_registers 24 with cluster ")
    assert reasons(producer_registers=24) == []


@pytest.mark.parametrize("n", [8, 24, 248])
def test_8_bit_results_are_stored_by_tma_in_rows_of_16_bytes_at_least(n: int) -> None:
    operation = GemmOperation("bf16", "bf16", "e4m3")
    (found,) = reasons(operation, tile=(128, n, 64))
    assert found.startswith(f"store tma, tile n {n}: rows of staging are 16 bytes or more")
    assert reasons(operation, tile=(128, n, 64), store="direct") == []
    assert reasons(OPERATION, tile=(128, n, 64)) == []


def test_no_tile_is_too_large_for_direct_stores_alone() -> None:
    """The narrowest chunk counts with all of its registers, whatever the type of D."""
    for d in ("e4m3", "bf16", "fp32"):
        operation = GemmOperation("bf16", "bf16", d)  # type: ignore[arg-type]
        (found,) = reasons(operation, tile=(256, 248, 64), store="direct", stages=2)
        assert "registers expected, 232 to have" in found


def test_a_swapped_tile_keeps_its_operands_and_turns_its_staging() -> None:
    swapped = gemm_layout(OPERATION, replace(SCHEDULE, tile=(32, 128, 64), swap_ab=True))
    assert (swapped.a.extent, swapped.b.extent) == (32, 128)
    assert swapped.store_box == (64, 32)  # 64 columns of D, 32 rows
    assert swapped.store_span == 128


@pytest.mark.parametrize("field", ["layout_a", "layout_b"])
def test_8_bit_operands_that_are_not_k_major_are_refused(field: str) -> None:
    layouts = {"layout_a": "col"} if field == "layout_a" else {"layout_b": "row"}
    operation = GemmOperation("e4m3", "e4m3", "bf16", **layouts)  # type: ignore[arg-type]
    (found,) = reasons(operation, tile=(128, 256, 128))
    assert f"{field[-1]} e4m3 not K-major: wgmma reads only 16-bit types MN-major" in found


def test_shared_memory_is_what_the_stages_the_staging_and_the_barriers_take() -> None:
    layout = gemm_layout(OPERATION, SCHEDULE)
    stage = (128 + 256) * 64 * 2
    staging = 2 * 2 * 64 * 128  # two consumers, two buffers of 64 rows of 128 bytes
    barriers = 3 * 2 * 8
    assert (layout.stage_bytes, layout.store_bytes) == (stage, staging)
    assert 0 <= layout.shared_bytes - (3 * stage + staging + barriers) < 1024
    assert gemm_layout(OPERATION, replace(SCHEDULE, store="direct")).store_bytes == 0
