"""Batches of A with one B: out may be a slice, and the epilogue's operands have natural shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.generator.specification import parse_name

FP32 = torch.float32
A = torch.randn(3, 2, 8, 16).bfloat16()
B = torch.randn(16, 24).bfloat16()
PRODUCT = A.float() @ B.float()


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))


def batched(**keywords: Any) -> bool:
    """Whether the call's kernel goes through the batches, and copies nothing."""
    told = warploom.explain(A, B, **keywords)
    assert told.copies == ()
    return bool(parse_name(told.kernel).operation.batched)  # type: ignore[union-attr]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.float(), expected, atol=1e-4)


ROWS = {  # scale_a, and whether D is one matrix all the same
    "[M]": (rand(8), False),
    "[batches, M]": (rand(3, 2, 8), True),
    "all rows": (rand(48), True),
    "some batches": (rand(3, 1, 8).expand(3, 2, 8), False),
    "[batches, M, 1]": (rand(3, 2, 8, 1), True),
    "[M, 1]": (rand(8, 1), False),
    "one batch": (rand(1, 1, 8), False),
}
# `some batches` lie neither one pitch apart nor all in one place, which no kernel reads.


@pytest.mark.parametrize("case", ROWS)
def test_scales_of_rows_broadcast_over_batches(case: str) -> None:
    scale, one_matrix = ROWS[case]
    if case == "some batches":
        with pytest.raises(ProblemError, match=r"scale_a of shape \[3, 2, 8\].*contiguous"):
            warploom.gemm(A, B, scale_a=scale)
        return
    rows = scale.reshape(-1, 8) if scale.numel() == 48 else scale.reshape(1, 8)
    factor = rows.reshape(3, 2, 8, 1) if scale.numel() == 48 else rows.reshape(8, 1)
    found = warploom.gemm(A, B, scale_a=scale, out_dtype=FP32)
    assert close(found, PRODUCT * factor)
    assert batched(scale_a=scale) is not one_matrix


COLUMNS = {"[N]": (24,), "[1, N]": (1, 24), "[1, 1, N]": (1, 1, 24), "[batches, N]": (3, 2, 24)}


@pytest.mark.parametrize("case", COLUMNS)
@pytest.mark.parametrize("keyword", ["scale_b", "bias"])
def test_columns_may_have_batches_and_the_dimension_of_scaled_mm(case: str, keyword: str) -> None:
    vector = rand(*COLUMNS[case])
    spread = vector.reshape(3, 2, 1, 24) if vector.numel() > 24 else vector.reshape(24)
    found = warploom.gemm(A, B, out_dtype=FP32, **{keyword: vector})  # type: ignore[arg-type]
    assert close(found, PRODUCT * spread if keyword == "scale_b" else PRODUCT + spread)
    assert batched(**{keyword: vector}) is (vector.numel() > 24)


RESIDUALS = {
    "[M, N]": (rand(8, 24), False),
    "expanded": (rand(8, 24).expand(3, 2, 8, 24), False),
    "[batches, M, N]": (rand(3, 2, 8, 24), True),
    "all rows": (rand(48, 24), True),
    "a slice": (rand(3, 2, 8, 60)[..., 7:31], True),
    "one row": (rand(1, 24).expand(48, 24), True),
}


@pytest.mark.parametrize("case", RESIDUALS)
def test_a_residual_broadcasts_over_batches(case: str) -> None:
    residual, one_matrix = RESIDUALS[case]
    spread = residual.reshape(3, 2, 8, 24) if residual.numel() > 192 else residual
    found = warploom.gemm(A, B, residual=residual, beta=-2.0, out_dtype=FP32)
    assert close(found, PRODUCT - 2 * spread)
    assert batched(residual=residual) is not one_matrix


def test_shapes_of_scaled_mm_fit_a_matrix_too() -> None:
    row, column = rand(8, 1), rand(1, 24)
    found = warploom.gemm(A[0, 0], B, scale_a=row, scale_b=column, out_dtype=FP32)
    assert close(found, PRODUCT[0, 0] * row * column)
    b = torch.stack([B, 2 * B])
    found = warploom.gemm(A, b, scale_a=row, scale_b=column, out_dtype=FP32)
    assert close(found, (A.float() @ b.float()) * row * column)


def test_messages_have_the_words_of_the_call() -> None:
    for keywords, said in (
        (
            {"scale_a": rand(7)},
            r"scale_a of shape \[7\]: must have shape \[8\] here, or of that in",
        ),
        ({"scale_b": rand(8)}, r"scale_b of shape \[8\]: must have shape \[24\].*each column"),
        ({"scale_d": rand(8)}, r"scale_d of shape \[8\]: must have one element"),
        ({"scale_a": rand(8).double()}, "scale_a of torch.float64: must be fp32"),
    ):
        with pytest.raises(ProblemError, match=said):
            warploom.gemm(A, B, **keywords)  # type: ignore[arg-type]
    listed = [("scale_a", rand(8)), ("scale_b", 2.0), ("scale_d", rand(1))]
    expected = warploom.gemm(A, B, scale_a=listed[0][1], scale_b=2.0, scale_d=listed[2][1])
    assert torch.equal(warploom.gemm(A, B, epilogue=listed), expected)


# ---- Where the result lies -----------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(2, 33), (2, 3, 11), (66, 1), (1, 66), (1, 1)], ids=str)
def test_a_result_goes_into_columns_of_a_larger_buffer(lead: tuple[int, ...]) -> None:
    a, b = torch.randn(*lead, 16).bfloat16(), torch.randn(100, 16).bfloat16().t()
    room = torch.full((*lead, 300), 7.0).bfloat16()
    out = room[..., 100:200]
    assert warploom.gemm(a, b, out=out) is out
    assert torch.equal(out, warploom.gemm(a, b))
    assert (room[..., :100] == 7).all()
    assert (room[..., 200:] == 7).all()
    assert warploom.explain(a, b, out=out).copies == ()


def test_columns_of_one_buffer_are_read_and_written() -> None:
    room = torch.randn(2, 33, 300).bfloat16()
    a, b = room[..., :100], torch.randn(100, 100).bfloat16()
    expected = warploom.gemm(a, b)
    warploom.gemm(a, b, out=room[..., 200:])
    assert torch.equal(room[..., 200:], expected)
    with pytest.raises(ProblemError, match="do not overlap"):
        warploom.gemm(a, b, out=room[..., 50:150])


def test_rows_without_one_pitch_are_refused_for_that() -> None:
    a, b = torch.randn(2, 33, 16).bfloat16(), torch.randn(16, 100).bfloat16()
    with pytest.raises(ProblemError, match="one stride through all rows: use a row-major out"):
        warploom.gemm(a, b, out=torch.empty(2, 40, 100).bfloat16()[:, :33])
