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


def spec(*schedule: int) -> KernelSpec:
    return KernelSpec("sm_90a", OPERATION, SparseGemmSchedule(*schedule))  # type: ignore[arg-type]


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
