"""What the generator says of the family: rules, launches, text and registers."""

from __future__ import annotations

import pytest
from precompiled import compiled

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families import family
from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeProblem,
    AttentionMergeSchedule,
    AttentionMergeShape,
)
from warploom.generator.launches import NO_GPU
from warploom.generator.model import rank
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch

FAMILY = family("attention_merge")
STEPS = (0, 128, 128)


def spec(dim: int = 128, threads: int = 128, lanes: int = 16, kinds: str = "bf16") -> KernelSpec:
    operation = AttentionMergeOperation(kinds, kinds, kinds, dim)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, AttentionMergeSchedule(threads, lanes))  # type: ignore[arg-type]


def problem(*extents: int) -> AttentionMergeProblem:
    return AttentionMergeProblem(extents, *([STEPS] * 6))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: spec(dim=100), "dim 100: must be a positive multiple of 8"),
        (lambda: spec(dim=520), "dim 520: must be 8 to 512"),
        (lambda: spec(dim=256, lanes=4), "lanes 4 of dim 256: must be at least 8"),
        (lambda: spec(kinds="e4m3"), "must be one of fp16, bf16, fp32"),
    ],
)
def test_what_is_not_legal_is_told(make: object, said: str) -> None:
    with pytest.raises(SpecificationError, match=said):
        make()  # type: ignore[operator]


def test_a_name_says_what_is_special() -> None:
    assert spec().name.startswith("attention_merge_sm90a_bf16_d128_128x16_")


@pytest.mark.parametrize(
    ("dim", "lanes"), [(8, 1), (16, 2), (64, 8), (96, 16), (256, 32), (512, 32)]
)
def test_every_row_has_as_many_threads_as_vectors_where_nothing_else_is_said(
    dim: int, lanes: int
) -> None:
    operation = AttentionMergeOperation("fp32", "bf16", "fp32", dim)
    chosen = dispatch.choose(operation, AttentionMergeShape(100)).spec.schedule
    assert chosen == AttentionMergeSchedule(128, lanes)  # type: ignore[arg-type]


@pytest.mark.parametrize("extents", [(1, 1, 1), (2, 3, 5), (1, 64, 129), (128, 32, 1)], ids=str)
def test_blocks_have_every_row_once(extents: tuple[int, int, int]) -> None:
    rows = extents[0] * extents[1] * extents[2]
    for one in (spec(), spec(96, 64, 4), spec(16, 512, 2)):
        (launch,) = FAMILY.launches(one, problem(*extents), NO_GPU)
        (tile,) = one.schedule.tile
        assert (launch.grid - 1) * tile < rows <= launch.grid * tile
        assert launch.parameters["rows"] == rows and launch.early


def test_what_takes_more_than_32_bits_is_refused() -> None:
    with pytest.raises(ProblemError, match="must be smaller"):
        FAMILY.launches(spec(), problem(2**15, 2**8, 2**8), NO_GPU)


def test_kernels_of_the_widest_types_do_not_spill() -> None:
    for one in (spec(kinds="fp32"), spec(512, 512, 32, "fp32")):
        assert all(entry.clean for entry in compiled(one).resources.values())


def test_lanes_past_the_end_of_a_row_move_nothing() -> None:
    assert "column >= kDim" in render(spec(96))


def test_the_model_knows_that_memory_limits_it() -> None:
    many = rank(None, [spec()], AttentionMergeShape(1 << 20), 132)[0].seconds
    assert 1.5e-4 < many < 3e-4
    assert rank(None, [spec()], AttentionMergeShape(8), 132)[0].seconds < 3e-6
