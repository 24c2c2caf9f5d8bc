"""Sums over the rows of D, which an epilogue's step fills a vector with."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.generator.epilogue import Bias, ColumnSum, EpilogueStep
from warploom.generator.families._product import Batches
from warploom.generator.families.gemm import (
    FAMILY,
    GemmOperation,
    GemmProblem,
    GemmSchedule,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._product.epilogue import bind
from warploom.runtime.families.gemm import operators
from warploom.runtime.families.gemm.call import GemmCall

BF16 = torch.bfloat16
M, K, N = 11, 24, 13
A = torch.randn(2, 3, M, K, generator=torch.Generator().manual_seed(1)).to(BF16)
B = torch.randn(K, N, generator=torch.Generator().manual_seed(2)).to(BF16)
BIAS = torch.randn(N, generator=torch.Generator().manual_seed(3))
PRODUCT = A.float() @ B.float()


def full(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


def test_sums_are_of_what_passes_there_and_it_goes_on_unchanged() -> None:
    """Summed after the scale, a bias would have a gradient of another scale."""
    first, last, amax = full(N), full(1, N), torch.zeros(1)
    listed: list[tuple[Any, ...]] = [("bias", BIAS), ("scale", -2.0)]
    given = [listed[0], ("column_sum", first), listed[1], ("column_sum", last), ("amax", amax)]
    found = warploom.gemm(A[0, 0], B, epilogue=given)
    assert torch.equal(found, warploom.gemm(A[0, 0], B, epilogue=listed))
    torch.testing.assert_close(first, (PRODUCT[0, 0] + BIAS).sum(0), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(last[0], -2 * first)


@pytest.mark.parametrize("b", [B, B.expand(2, 3, K, N)], ids=["one b", "batches of b"])
def test_a_vector_is_summed_over_all_batches_and_one_for_each_over_its_own(
    b: torch.Tensor,
) -> None:
    whole, each = full(N), full(2, 3, N)
    warploom.gemm(A, b, epilogue=[("column_sum", whole)])
    warploom.gemm(A, b, epilogue=[("column_sum", each)])
    torch.testing.assert_close(each, PRODUCT.sum(-2), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(whole, PRODUCT.sum((0, 1, 2)), rtol=1e-5, atol=1e-4)


def test_sums_of_each_batch_need_the_kernel_that_knows_them() -> None:
    """Rows of all batches are one matrix's else, whose groups of rows go across batches."""
    for shape, batched in (((N,), False), ((2, 3, N), True)):
        listed = [("column_sum", full(*shape))]
        assert bind(listed, (2, 3), M, N, -1, batched=False).batched is batched


def test_only_the_sums_are_stored() -> None:
    room = torch.full((2, N + 4), -7.0)
    warploom.gemm(A, B, epilogue=[("column_sum", room[1, 3 : 3 + N])])
    torch.testing.assert_close(room[1, 3 : 3 + N], PRODUCT.sum((0, 1, 2)), rtol=1e-5, atol=1e-4)
    room[1, 3 : 3 + N] = -7
    assert (room == -7).all()


def test_sums_of_no_rows_are_0_and_of_no_products_those_of_the_epilogue() -> None:
    sums = full(N)
    warploom.gemm(A[0, 0, :0], B, epilogue=[("bias", BIAS), ("column_sum", sums)])
    assert torch.equal(sums, torch.zeros(N))
    warploom.gemm(A[0, 0, :, :0], B[:0], epilogue=[("bias", BIAS), ("column_sum", sums)])
    torch.testing.assert_close(sums, M * BIAS)


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (full(M), r"column_sum of shape \[11\].*\[13\] here"),
        (full(3, N), r"column_sum of shape \[3, 13\].*must have shape \[13\], or \[2, 3, 13\]"),
        (full(N).expand(2, 3, N), "no two elements at one address"),
        (full(N).bfloat16(), "must be fp32"),
        (full(N, 2)[:, 0], "contiguous along its last dimension"),
    ],
    ids=["another extent", "some batches", "expanded", "another type", "apart"],
)
def test_a_vector_that_cannot_be_filled_is_refused_by_name(sums: torch.Tensor, said: str) -> None:
    with pytest.raises(ProblemError, match=f"(?s){said}"):
        warploom.gemm(A, B.expand(2, 3, K, N), epilogue=[("column_sum", sums)])


def test_a_vector_is_not_read_by_the_same_call() -> None:
    for listed in (
        [("bias", BIAS), ("column_sum", BIAS)],
        [("column_sum", BIAS), ("scale_column", BIAS)],
        [("column_sum", BIAS), ("column_sum", BIAS)],
    ):
        with pytest.raises(ProblemError, match=r"column_sum at .* and .*do not overlap"):
            warploom.gemm(A, B, epilogue=listed)


def test_sums_cross_the_operator() -> None:
    sums, expected = full(N), full(N)
    listed = [("relu_gradient", torch.randn(2, 3, M, N)), ("column_sum", sums)]
    found = operators.call(GemmCall(A, B, listed, None, None, True, None))
    wanted = [listed[0], ("column_sum", expected)]
    assert torch.equal(found, warploom.gemm(A, B, epilogue=wanted))
    assert torch.equal(sums, expected)


# ---- What is launched ----------------------------------------------------------------------------


def described(
    *steps: EpilogueStep, batch_pitches: tuple[int, ...] = (), batches: int = 1, **schedule: Any
) -> tuple[KernelSpec, GemmProblem]:
    batched = batches > 1
    operation = GemmOperation("bf16", "bf16", "bf16", epilogue=steps, batched=batched)
    fields = {"tile": (128, 128, 64), "stages": 3, **schedule}
    lie = Batches(batches, 512)
    problem = GemmProblem(
        *(1000, 200, 64, 64, 64, 200),
        batches=batches,
        batches_a=lie,
        batches_b=lie,
        batch_pitch_d=200_000,
        batch_pitch_steps=batch_pitches,
    )
    return KernelSpec("sm_90a", operation, GemmSchedule(**fields)), problem


@pytest.mark.parametrize(("swap", "groups"), [(False, 63), (True, 125)])
@pytest.mark.parametrize(
    ("batches", "pitch", "vectors"), [(1, 0, 1), (3, 0, 1), (3, 200, 3)], ids=str
)
def test_partial_sums_have_room_and_are_all_added_up(
    swap: bool, groups: int, batches: int, pitch: int, vectors: int
) -> None:
    """A group of rows too few would lose the last rows, and one too many add what is not there."""
    pitches = (0, pitch) if batches > 1 else ()
    spec, problem = described(
        Bias("fp32"), ColumnSum(), batches=batches, batch_pitches=pitches, swap_ab=swap
    )
    (room,) = FAMILY.workspaces(spec, problem)
    assert room.tensor == "column_sum_1_partial"
    assert room.bytes == 4 * batches * groups * 200
    product, sums = FAMILY.launches(spec, problem, DeviceLimits(132))
    assert sums.entry == f"{product.entry}_column_sum_1"
    assert sums.grid == vectors * 7
    assert sums.parameters["column_sum_1_groups"] == groups * batches // vectors
    assert sums.parameters.get("column_sum_1_partial_batch", 0) in (0, groups * 200)


def test_each_sum_has_its_own_launch_and_room_and_other_kernels_have_one_launch() -> None:
    spec, problem = described(ColumnSum(), Bias("fp32"), ColumnSum())
    entries = [launch.entry for launch in FAMILY.launches(spec, problem, DeviceLimits(132))]
    assert entries == [spec.name, f"{spec.name}_column_sum_0", f"{spec.name}_column_sum_2"]
    assert len({room.tensor for room in FAMILY.workspaces(spec, problem)}) == 2
    spec, problem = described(Bias("fp32"))
    assert len(FAMILY.launches(spec, problem, DeviceLimits(132))) == 1
    assert FAMILY.workspaces(spec, problem) == []


def test_torch_finds_no_fault_with_an_operator_that_sums() -> None:
    arguments = (A, B, ["column_sum"], [], [], BF16, "fast", None)
    into = {"out": torch.empty(2, 3, M, N, dtype=BF16), "column_sum": full(N)}
    torch.library.opcheck(cast("Any", torch.ops.warploom).gemm_out.default, arguments, into)
