"""What leaves a GEMM on the CPU: 8-bit types that saturate, amax, scale_d, sums made in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.generator.families.gemm import Accumulation, GemmOperation
from warploom.generator.specification import parse_name
from warploom.runtime.accumulation import accumulated
from warploom.runtime.families.gemm import reference

BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMITS = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}
OUTPUTS = pytest.mark.parametrize("dtype", LIMITS, ids=str)


def returned(values: list[float], dtype: torch.dtype, **keywords: Any) -> list[float]:
    """What `values`, added to a product of 0, become in `dtype`."""
    zero = torch.zeros(1, 16, dtype=BF16)
    bias = torch.tensor(values)
    b = torch.zeros(16, len(values), dtype=BF16)
    made = warploom.gemm(zero, b, bias=bias, out_dtype=dtype, **keywords)
    assert made.dtype == dtype
    return made.float()[0].tolist()


# ---- 8-bit outputs -------------------------------------------------------------------------------


@OUTPUTS
def test_what_is_too_large_becomes_the_largest_number(dtype: torch.dtype) -> None:
    limit = LIMITS[dtype]
    least = -128.0 if dtype == INT8 else -limit
    large = [limit, limit * 1.001, limit * 2, 1e38, float("inf")]
    assert returned(large, dtype) == [limit] * 5
    assert returned([-value for value in large[2:]], dtype) == [least] * 3


@OUTPUTS
def test_nan_is_kept_and_is_0_where_there_is_none(dtype: torch.dtype) -> None:
    (made,) = returned([float("nan")], dtype)
    assert made == 0 if dtype == INT8 else made != made


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_number_halfway_between_two_fp8_goes_to_the_even_one(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = numbers.float()[numbers.float().isfinite()].unique()
    low, high = finite[:-1], finite[1:]
    even = torch.where(low.to(dtype).view(torch.uint8) % 2 == 0, low, high)
    halfway = (low + high) / 2
    assert len(halfway) > 240
    assert returned(halfway.tolist(), dtype) == even.tolist()
    assert returned(finite.tolist(), dtype) == finite.tolist()
    just_above = torch.nextafter(halfway, high)
    assert returned(just_above.tolist(), dtype) == high.tolist()


def test_int8_goes_to_the_even_number_too() -> None:
    halves = [0.5, 1.5, 2.5, 126.5, -0.5, -1.5, -127.5, -128.5]
    assert returned(halves, INT8) == [0, 2, 2, 126, 0, -2, -128, -128]


@OUTPUTS
@pytest.mark.parametrize("a_type", [BF16, E4M3, INT8], ids=str)
def test_an_8_bit_result_is_within_its_bound(a_type: torch.dtype, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(29, 61, generator=generator), torch.randn(61, 23, generator=generator)
    a, b = ((value * 8).to(a_type) for value in values)
    listed = [("scale", 2.0**-5)]
    made = warploom.gemm(a, b, epilogue=listed, out_dtype=dtype)
    exact, bound = reference.gemm_bound(a, b, listed, dtype)
    assert ((made.double() - exact).abs() <= bound).all()
    step = {E4M3: 2.0**-3, E5M2: 2.0**-2}  # relative distance to the next number
    wrong = made.float() * (1 + step[dtype]) if dtype != INT8 else made.float() + 1
    assert ((wrong.double() - exact).abs() > bound)[made.float().abs() > 1].double().mean() > 0.9


def test_int32_sums_are_not_saturated_by_accident() -> None:
    a, b = torch.full((1, 2048), 127, dtype=INT8), torch.full((2048, 1), 127, dtype=INT8)
    assert warploom.gemm(a, b).item() == 2048 * 127 * 127
    assert warploom.gemm(a, b, out_dtype=INT8).item() == 127


# ---- scale_d and amax ----------------------------------------------------------------------------

A = torch.randn(11, 24, generator=torch.Generator().manual_seed(1)).to(BF16)
B = torch.randn(24, 13, generator=torch.Generator().manual_seed(2)).to(BF16)
LARGEST = (A.float() @ B.float()).abs().max()


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.tensor([0.5])], ids=repr)
def test_scale_d_comes_after_everything_else(scale: float | torch.Tensor) -> None:
    residual, bias = torch.ones(11, 13), torch.ones(13)
    made = warploom.gemm(A, B, bias=bias, residual=residual, scale_d=scale, out_dtype=FP32)
    assert torch.allclose(made, (A.float() @ B.float() + 2) * 0.5, atol=1e-5)


def test_amax_is_the_largest_magnitude_before_scale_d() -> None:
    amax = torch.zeros(1)
    warploom.gemm(-A, B, amax=amax, scale_d=1000.0, out_dtype=E4M3)
    assert amax.item() == pytest.approx(LARGEST.item(), rel=1e-6)


def test_amax_is_taken_where_it_stands_in_a_list() -> None:
    first, last = torch.zeros(()), torch.zeros(1, 1)
    steps = [("amax", first), ("activation", "relu"), ("scale", -3.0), ("amax", last)]
    warploom.gemm(A, B, epilogue=steps)
    product = A.float() @ B.float()
    assert first.item() == pytest.approx(LARGEST.item(), rel=1e-6)
    assert last.item() == pytest.approx(3 * product.max().item(), rel=1e-6)


def test_amax_grows_over_several_calls_and_never_shrinks() -> None:
    amax = torch.zeros(1)
    seen = []
    for factor in (1.0, 4.0, 2.0):
        warploom.gemm(A * factor, B, amax=amax)
        seen.append(amax.item() / LARGEST.item())
    assert seen == pytest.approx([1, 4, 4], rel=1e-6)


def test_nan_wins_over_every_number_and_stays() -> None:
    a, amax = A.clone(), torch.zeros(1)
    a[3, 5] = torch.nan
    warploom.gemm(a, B, amax=amax)
    assert amax.isnan()
    warploom.gemm(A, B, amax=amax)
    assert amax.isnan()


def test_infinity_is_the_largest_number() -> None:
    amax = torch.zeros(1)
    infinity = torch.tensor(float("inf"))
    warploom.gemm(A, B, scale_a=infinity, scale_b=2.0, amax=amax, out_dtype=FP32)
    assert amax.item() == float("inf")


@pytest.mark.parametrize(("m", "n"), [(0, 13), (11, 0), (0, 0)])
def test_an_empty_result_leaves_amax(m: int, n: int) -> None:
    amax = torch.full((1,), 0.25)
    warploom.gemm(A[:m], B[:, :n], amax=amax)
    warploom.gemm(A[:m].expand(2, m, 24), B[:, :n].expand(2, 24, n), amax=amax)
    assert amax.item() == 0.25


def test_amax_of_an_empty_sum_is_that_of_the_epilogue_of_0() -> None:
    amax = torch.zeros(1)
    warploom.gemm(A[:, :0], B[:0], bias=torch.full((13,), -2.0), amax=amax)
    assert amax.item() == 2.0


def test_amax_is_over_all_batches() -> None:
    a, amax = torch.stack([A, A * 8, A * 2]), torch.zeros(1)
    warploom.gemm(a, B.expand(3, 24, 13), amax=amax)
    assert amax.item() == pytest.approx(8 * LARGEST.item(), rel=1e-6)


def test_a_quantised_result_times_its_scale_is_the_result() -> None:
    amax = torch.zeros(1)
    warploom.gemm(A, B, amax=amax)
    d = warploom.gemm(A, B, scale_d=LIMITS[E4M3] / amax, out_dtype=E4M3)
    assert d.float().abs().max() == LIMITS[E4M3]
    back = d.float() * amax / LIMITS[E4M3]
    assert torch.allclose(back, A.float() @ B.float(), rtol=2.0**-4, atol=1e-3 * amax.item())


# ---- Batches of the epilogue's operands ----------------------------------------------------------


@pytest.mark.parametrize("own", [(), (1, 1), (2, 3)], ids=str)
def test_an_operand_of_the_epilogue_has_every_batch_or_none(own: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(2, 3, 5, 16, generator=generator).to(BF16)
    b = torch.randn(1, 3, 16, 7, generator=generator).to(BF16)
    row, column, bias = (torch.rand(*own, n, generator=generator) for n in (5, 7, 7))
    residual = torch.randn(*own, 5, 7, generator=generator)
    keywords = {"scale_a": row, "scale_b": column, "bias": bias, "residual": residual}
    made = warploom.gemm(a, b, **keywords, beta=0.5, out_dtype=FP32)
    scaled = (a.float() @ b.float()) * row[..., :, None] * column[..., None, :]
    expected = scaled + bias[..., None, :] + 0.5 * residual
    assert torch.allclose(made, expected, atol=1e-5)


# ---- In place ------------------------------------------------------------------------------------


def test_a_gradient_accumulates_in_place_in_fp32_without_a_copy() -> None:
    x, dy = A, torch.randn(11, 8, generator=torch.Generator().manual_seed(3)).to(BF16)
    grad = torch.randn(8, 24, generator=torch.Generator().manual_seed(4))
    expected = grad + 3 * (dy.float().mT @ x.float())
    for _ in range(3):
        made = warploom.gemm(dy.mT, x, out=grad, residual=grad, out_dtype=FP32)
        assert made is grad
    assert torch.allclose(grad, expected, atol=1e-4)
    keywords: dict[str, Any] = {"out": grad, "residual": grad, "out_dtype": FP32}
    assert warploom.explain(dy.mT, x, **keywords).copies == ()


def test_batches_of_out_may_be_the_residual_too() -> None:
    a, b = A.expand(3, 11, 24), torch.stack([B, B * 2, B * 3])
    out = torch.ones(3, 11, 13)
    warploom.gemm(a, b, out=out, residual=out, beta=2.0)
    assert torch.allclose(out, a.float() @ b.float() + 2, atol=1e-5)


def test_batches_of_out_may_lie_beside_each_other() -> None:
    room = torch.full((11, 3, 13), torch.nan)
    out = room.transpose(0, 1)
    b = torch.stack([B, B * 2, B * 3])
    assert warploom.gemm(A, b, out=out) is out
    assert torch.equal(out, warploom.gemm(A, b, out_dtype=FP32))


# ---- Accumulation --------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", ["fast", "promoted"])
def test_an_accumulation_is_part_of_the_kernel_that_is_chosen(
    accumulation: Accumulation,
) -> None:
    a, b = A[:, :16].to(E4M3), B.to(E5M2).t().contiguous().t()[:16]
    fast = accumulation == "fast"
    kernel = parse_name(warploom.explain(a, b, use_fast_accum=fast).kernel)
    assert isinstance(kernel.operation, GemmOperation)
    assert kernel.operation.accumulation == accumulation
    assert torch.equal(warploom.gemm(a, b, use_fast_accum=fast), warploom.gemm(a, b))


def test_promoted_sums_are_allowed_less_error_the_longer_they_are() -> None:
    shares = [
        accumulated(E4M3, k, "promoted") / accumulated(E4M3, k, "fast") for k in (128, 1024, 8192)
    ]
    assert shares[0] == pytest.approx(1, rel=1e-3)
    assert shares[1] == pytest.approx(5 / 33, rel=1e-2)  # 1 + 4 steps of 32, and 1 + 32
    assert shares[2] == pytest.approx(5 / 257, rel=1e-2)
    assert accumulated(BF16, 64, "promoted") == pytest.approx(accumulated(BF16, 64), rel=0.1)
    assert accumulated(BF16, 4096, "promoted") < accumulated(BF16, 4096) / 12
