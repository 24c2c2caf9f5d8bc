"""What launches hold, and which schedules are legal."""

from __future__ import annotations

import pytest

from warploom.errors import ProblemError
from warploom.generator.architectures import architecture
from warploom.generator.families import family
from warploom.generator.families.sparse_gemm import (
    SparseGemmOperation,
    SparseGemmProblem,
    SparseGemmSchedule,
    SparseGemmShape,
)
from warploom.generator.launches import NO_GPU
from warploom.generator.specification import KernelSpec

FAMILY = family("sparse_gemm")
OPERATION = SparseGemmOperation("bf16", bias=True)


def spec(
    *schedule: int, split_k: int = 1, operation: SparseGemmOperation = OPERATION
) -> KernelSpec:
    made = SparseGemmSchedule(*schedule, split_k=split_k)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, made)


def test_a_launch_has_a_block_for_each_tile_up_to_all_multiprocessors() -> None:
    kernel = spec(2, 2, 192, 4)
    few = SparseGemmProblem(100, 300, 96, 96, 300)
    (launch,) = FAMILY.launches(kernel, few, NO_GPU)
    assert (launch.grid, launch.block) == (2, 384)
    values, x = launch.parameters["values_map"], launch.parameters["x_map"]
    assert (values.extents, values.pitches, values.box, values.span) == (  # type: ignore[union-attr]
        (48, 300),
        (96,),
        (32, 256),
        64,
    )
    assert (x.extents, x.pitches, x.box, x.span) == ((96, 100), (192,), (64, 192), 128)  # type: ignore[union-attr]
    assert launch.parameters["k_tiles"] == 2
    many = SparseGemmProblem(8192, 8192, 8192, 8192, 8192)
    assert FAMILY.launches(kernel, many, NO_GPU)[0].grid == NO_GPU.multiprocessors


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ((3, 2, 64, 4), "384 rows of the weight in a tile"),
        ((2, 2, 256, 4), "registers expected"),
        ((1, 1, 256, 16), "shared memory"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(schedule: tuple[int, ...], reason: str) -> None:
    made = SparseGemmSchedule(*schedule)  # type: ignore[arg-type]
    reasons = FAMILY.schedule_reasons(architecture("sm_90a"), OPERATION, made)
    assert any(reason in one for one in reasons), reasons


def test_parts_of_k_have_a_stage_each_and_room_for_their_accumulators() -> None:
    kernel = spec(2, 1, 32, 8, split_k=4)
    sums, arrived = FAMILY.workspaces(kernel, SparseGemmProblem(40, 300, 1024, 1024, 300))
    tiles = 2 * 3
    assert (sums.tensor, sums.bytes, sums.kept) == ("partial_sums", tiles * 4 * 128 * 32 * 4, False)
    assert (arrived.tensor, arrived.bytes, arrived.kept) == ("arrived", 4 * tiles * 2, True)
    for k, parts in ((1024, 4), (192, 3), (16, 1)):
        (launch,) = FAMILY.launches(kernel, SparseGemmProblem(40, 300, k, 1024, 300), NO_GPU)
        assert (launch.parameters["parts"], launch.grid) == (parts, tiles * parts)


def test_stages_of_8_bits_have_twice_the_columns() -> None:
    operation = SparseGemmOperation("int8", output="bf16", scaled=True)
    kernel = spec(2, 2, 192, 4, operation=operation)
    problem = SparseGemmProblem(100, 300, 160, 160, 300, 100, 1)
    (launch,) = FAMILY.launches(kernel, problem, NO_GPU)
    values, x = launch.parameters["values_map"], launch.parameters["x_map"]
    assert (values.extents, values.box, values.span) == ((80, 300), (64, 256), 64)  # type: ignore[union-attr]
    assert (x.extents, x.box, x.span) == ((160, 100), (128, 192), 128)  # type: ignore[union-attr]
    assert [launch.parameters[name] for name in ("k_tiles", "k_words")] == [2, 3]
    assert [launch.parameters[name] for name in ("x_step", "w_step")] == [1, 0]


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (SparseGemmOperation("bf16", output="fp16"), "output fp16: must be like_x"),
        (SparseGemmOperation("int8"), "output like_x: must be bf16 or fp16"),
        (SparseGemmOperation("fp16", scaled=True), "scaled: must be false"),
    ],
)
def test_operations_that_do_not_exist_are_named(
    operation: SparseGemmOperation, reason: str
) -> None:
    assert any(reason in one for one in FAMILY.operation_reasons(operation))


def test_extents_beyond_32_bits_are_refused() -> None:
    far = SparseGemmProblem(2**31 - 1, 64, 64, 64, 64)
    with pytest.raises(ProblemError, match="m 2147483647"):
        FAMILY.launches(spec(1, 1, 64, 8), far, NO_GPU)


def test_the_model_counts_waves_of_tiles() -> None:
    """8192 rows make 11 waves, of 4096 there are 6; beside these a launch takes little."""

    def seconds(m: int) -> float:
        shape = SparseGemmShape(m, 8192, 8192)
        schedule = SparseGemmSchedule(2, 2, 192, 4)
        return FAMILY.seconds(FAMILY.constants, OPERATION, schedule, shape, 132)

    assert 1.8 < seconds(8192) / seconds(4096) < 11 / 6
    assert seconds(64) < seconds(4096)
