"""What the generator says of the family: rules, launches, registers."""

from __future__ import annotations

import pytest
from precompiled import compiled

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families import family
from warploom.generator.families.combine import (
    CombineOperation,
    CombineProblem,
    CombineSchedule,
    CombineShape,
)
from warploom.generator.launches import NO_GPU
from warploom.generator.model import rank
from warploom.generator.specification import KernelSpec

FAMILY = family("combine")


def spec(threads: int = 128, values: str = "bf16", **fields: object) -> KernelSpec:
    operation = CombineOperation(values, **fields)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, CombineSchedule(threads))  # type: ignore[arg-type]


def problem(tokens: int, k: int = 8, columns: int = 2048) -> CombineProblem:
    return CombineProblem(tokens, k, columns, tokens * k, columns, columns)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: spec(values="e4m3"), "must be one of fp16, bf16, fp32"),
        (lambda: spec(dot=True, weights="fp32"), "must be with direction permute"),
        (lambda: spec(dot=True, direction="permute"), "and with weights"),
    ],
)
def test_what_is_not_legal_is_told(make: object, said: str) -> None:
    with pytest.raises(SpecificationError, match=said):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("columns", [8, 1024, 1032, 2048, 2880, 7168])
def test_ctas_have_every_column_of_every_token_once(columns: int) -> None:
    """A grid of too few CTAs would leave columns of the last tokens unwritten."""
    for threads in (64, 128, 512):
        (launch,) = FAMILY.launches(spec(threads), problem(13, columns=columns), NO_GPU)
        chunks = int(launch.parameters["chunks"])  # type: ignore[call-overload]
        assert (chunks - 1) * threads * 8 < columns <= chunks * threads * 8
        assert launch.grid == 13 * chunks


def test_warps_have_every_row_once() -> None:
    for tokens, k in ((1, 1), (3, 5), (64, 8)):
        (launch,) = FAMILY.launches(spec(256, direction="permute"), problem(tokens, k), NO_GPU)
        assert (launch.grid - 1) * 8 < tokens * k <= launch.grid * 8


def test_what_takes_more_than_32_bits_is_refused() -> None:
    for one in (spec(), spec(direction="permute")):
        with pytest.raises(ProblemError, match="must be smaller"):
            FAMILY.launches(one, problem(2**28), NO_GPU)


def test_a_kernel_of_the_widest_types_does_not_spill() -> None:
    """The one of the other direction is among those of smoke.yaml."""
    widest = spec(512, "fp32", weights="fp32")
    assert all(entry.clean for entry in compiled(widest).resources.values())


def test_the_model_knows_that_memory_limits_it() -> None:
    many = rank(None, [spec(weights="fp32")], CombineShape(32_768, 8, 2048), 132)[0].seconds
    assert 2.5e-4 < many < 5e-4
    assert rank(None, [spec()], CombineShape(1, 8, 2048), 132)[0].seconds < 3e-6
