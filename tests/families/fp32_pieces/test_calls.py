"""Pieces on the CPU: what they add up to, where they are stored, what is refused."""

from __future__ import annotations

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.fp32_pieces.api import split
from warploom.runtime.families.fp32_pieces.call import Fp32PiecesCall
from warploom.runtime.plan import run

FP16, BF16 = torch.float16, torch.bfloat16
SCHEMES = [(FP16, 2, 2.0**-23), (BF16, 2, 2.0**-17), (BF16, 3, 0.0)]


def added(q: torch.Tensor, scale: torch.Tensor | None, count: int, k: int) -> torch.Tensor:
    """The sum of the pieces, times the scale, in float64."""
    place = q.shape[-1] // count
    total = q.double().unflatten(-1, (count, place)).sum(-2)[..., :k]
    return total if scale is None else total * scale[2].double()[..., None]


@pytest.mark.parametrize(
    ("dtype", "count", "error", "size"),
    [
        (*scheme, size)
        for scheme in SCHEMES
        for size in ((0, -100, 100, -140) if scheme[0] == FP16 else (0, -100, 100))
    ],  # bf16 has no pieces as small as the smallest
    ids=str,
)
def test_pieces_add_up_to_the_value(
    dtype: torch.dtype, count: int, error: float, size: int
) -> None:
    x = torch.randn(3, 5, 70) * torch.exp2(torch.randint(-30, 1, (3, 5, 70)) + 0.0) * 2.0**size
    q, scale = warploom.fp32_pieces(x, dtype, count)
    assert q.shape == (3, 5, count * 128) and q.dtype == dtype
    peaks = x.double().abs().amax(-1, keepdim=True)
    least = peaks * 2.0**-39 if dtype == FP16 else 2.0**-134  # half of the smallest bf16
    found = (added(q, scale, count, 70) - x.double()).abs()
    assert (found <= (error * x.double().abs()).clamp(min=least)).all()
    places = q.unflatten(-1, (count, 128))
    assert not places[..., 70:].any()


def test_scales_are_powers_of_two_in_two_parts_and_whole() -> None:
    x = torch.randn(4, 70) * torch.tensor([[2.0**120], [1.0], [2.0**-140], [0.0]])
    _, scale = warploom.fp32_pieces(x)
    assert scale is not None
    assert torch.equal(scale[0].double() * scale[1].double(), scale[2].double())
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))
    assert scale[0].max() <= 2.0**64


@pytest.mark.parametrize(("dtype", "count", "error"), SCHEMES, ids=str)
def test_what_is_not_finite_has_a_first_piece_alone(
    dtype: torch.dtype, count: int, error: float
) -> None:
    x = torch.randn(2, 64)
    x[0, 3], x[0, 4], x[1, 5] = torch.inf, torch.nan, torch.finfo(torch.float32).max
    q, scale = warploom.fp32_pieces(x, dtype, count)
    pieces = q.unflatten(-1, (count, 64))
    assert pieces[0, 0, 3].isinf() and pieces[0, 0, 4].isnan()
    assert not pieces[0, 1:, 3:5].any()
    assert pieces[1].isfinite().all()
    others = added(q, scale, count, 64)[0, 5:]
    assert torch.allclose(others, x[0, 5:].double(), rtol=2 * error, atol=1e-9)


def test_a_transposed_matrix_is_read_where_it_is_stored() -> None:
    x = torch.randn(70, 33).t()
    plan = warploom.explain(warploom.fp32_pieces, x, gpu="h200")
    assert "_col_" in plan.kernel and not plan.copies
    for one, other in zip(
        warploom.fp32_pieces(x), warploom.fp32_pieces(x.contiguous()), strict=True
    ):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize(
    ("x", "dtype", "count", "problem"),
    [
        (torch.ones(4, 4).bfloat16(), FP16, 2, "must be .*torch.float32"),
        (torch.ones(4), FP16, 2, r"must be \[.., m, k\]"),
        (torch.ones(4, 4), FP16, 3, "count 3 of pieces of torch.float16"),
        (torch.ones(4, 4), torch.float32, 2, "dtype torch.float32"),
        (torch.ones(4, 4, requires_grad=True), FP16, 2, "x that requires grad"),
    ],
    ids=str,
)
def test_what_it_does_not_take_is_named(
    x: torch.Tensor, dtype: torch.dtype, count: int, problem: str
) -> None:
    with pytest.raises(ProblemError, match=problem):
        warploom.fp32_pieces(x, dtype, count)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_empty_matrices_have_no_pieces(shape: tuple[int, int]) -> None:
    q, scale = warploom.fp32_pieces(torch.empty(shape))
    assert scale is not None and scale.shape == (3, shape[0])
    assert q.shape == (shape[0], 128 if shape[1] else 0)


def span(x: torch.Tensor) -> list[int]:
    found = split(x, FP16, 2).span
    assert found is not None
    return found.tolist()[:3]


def test_what_rows_span_is_counted() -> None:
    """Small is what is below 2^-7 of the largest, lost what is also inexact: here below 2^-16."""
    x = torch.ones(3, 70)
    x[0, :9], x[1] = 2.0**-8, 0
    assert span(x) == [9, 0, 70]  # exact in one piece, and rows of zeros do not count
    x[2, :5] = 1.1 * 2.0**-20
    assert span(x) == [10, 5, 70]
    x[2, 10], x[2, 20] = torch.inf, torch.nan  # which have no say
    assert span(x) == [10, 5, 70]
    most = [0, 0, 0]
    for row in range(0, 200, 64):
        of = span(x.repeat(67, 1)[row : row + 64].contiguous())
        most = [max(one, other) for one, other in zip(most, of, strict=True)]
    assert most == [10, 5, 70]


def test_rows_read_across_count_no_less() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 500) * torch.exp2(torch.randint(-20, 1, (300, 500)).float())
    (small, lost, k), across = span(x), span(x.t().contiguous().t())
    assert across[0] >= small and (across[1] > 0) == (lost > 0) and across[2] == k


@pytest.mark.parametrize(
    ("of_a", "of_b", "holds"),
    [
        ((70, 0), (70, 0), True),
        ((40, 1), (30, 0), True),
        ((40, 1), (31, 0), False),
        ((1, 0), (70, 3), False),
    ],
)
def test_bf16_pieces_of_scaled_rows_are_made_where_fp16_pieces_do_not_hold(
    of_a: tuple[int, int], of_b: tuple[int, int], holds: bool
) -> None:
    x = torch.randn(5, 70) * 2.0**-140
    _, scale, _ = split(x, FP16, 2)
    words = [torch.tensor([*of, 70, 0], dtype=torch.int32) for of in (of_a, of_b)]
    call = Fp32PiecesCall(x, BF16, 3, None, scale, *words)
    call.out = torch.full((5, 3 * 128), 7.0, dtype=BF16)
    run(call)
    assert scale is not None
    if holds:
        assert (call.out == 7).all()
    else:
        assert torch.allclose(added(call.out, scale, 3, 70), x.double(), rtol=2.0**-23, atol=0)
    with pytest.raises(ProblemError, match="fp32_pieces without span_b"):
        run(Fp32PiecesCall(x, BF16, 3, None, scale, words[0]))
