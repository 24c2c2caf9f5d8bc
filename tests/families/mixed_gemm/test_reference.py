"""The bounds of results: what a kernel may do is within them, and what it must not do is not."""

from __future__ import annotations

import pytest
import torch
from mixed_samples import BF16, E4M3, FP16, FP32, K, activations_of, random, sample

import warploom
from warploom.quantization import PackedWeight
from warploom.runtime.families.mixed_gemm.reference import bound, error_share, mixed_gemm, ways
from warploom.runtime.measure import largest_share

DEEP = 4096
CASES = [
    (dtype, format, group)
    for dtype in (BF16, FP16, E4M3)
    for format, group in (("int4", 128), ("uint4", 64), ("int4", None))
]


@pytest.mark.parametrize(("dtype", "format", "group"), CASES)
def test_a_lost_step_of_k_and_a_scale_of_the_next_group_are_wrong(
    dtype: torch.dtype, format: str, group: int | None
) -> None:
    weight, _ = sample(format, group, activations=activations_of(dtype), n=64, k=DEEP)
    a = random(16, DEEP, dtype=dtype)
    d = mixed_gemm(a, weight, (), FP32)
    assert error_share(d, a, weight) < 0.1
    less = a.float()
    less[:, -16:] = 0
    assert error_share(mixed_gemm(less.to(dtype), weight, (), FP32), a, weight) > 4
    if group is not None:
        codes, scales, zeros = weight.unpack()
        moved = PackedWeight.from_codes(
            codes,
            scales.roll(1, 1),
            zeros,
            format=format,
            group=group,
            activations=activations_of(dtype),
        )
        d = mixed_gemm(a, moved, (), FP32)
        assert error_share(d, a, weight) > 4


def test_weights_that_are_rounded_are_right_where_kernels_may_round_them() -> None:
    """In one way throughout: a result that is half of each is of no kernel."""
    a = random(16, DEEP)
    weight, _ = sample(n=64, k=DEEP)
    rounded = (a.double() @ weight.dequantize(BF16).double().t()).float()
    exact = warploom.mixed_gemm(a, weight, out_dtype=FP32)
    assert ways(BF16, weight) == ("sums", "weights")
    assert largest_share(rounded, *bound(a, weight, (), FP32, "weights")) < 0.1
    assert largest_share(rounded, *bound(a, weight, (), FP32, "sums")) > 1
    assert error_share(rounded, a, weight) < 0.1
    mixed = torch.where(torch.arange(64) < 32, rounded, exact)
    assert error_share(mixed, a, weight) > 1


def test_only_sums_are_scaled_of_8_bits_and_per_channel() -> None:
    assert ways(E4M3, sample(activations="e4m3").packed) == ("sums",)
    assert ways(BF16, sample("int4", None).packed) == ("sums",)


def test_a_nan_is_wrong() -> None:
    a, (weight, _) = random(4, K), sample()
    d = warploom.mixed_gemm(a, weight)
    d[1, 2] = float("nan")
    assert error_share(d, a, weight) == float("inf")
