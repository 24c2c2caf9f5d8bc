"""What `warploom.mixed_gemm` computes on CPU tensors: the function of codes and scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixed_samples import BF16, E4M3, FP16, FP32, KINDS, K, N, activations_of, random, sample

import warploom
from warploom.generator.formats import FORMATS
from warploom.runtime.families.mixed_gemm import api

CASES = [
    (dtype, *kind)
    for dtype in (BF16, FP16, E4M3, torch.int8)
    for kind in KINDS
    if activations_of(dtype) in FORMATS[kind[0]].orders
]


@pytest.mark.parametrize(("dtype", "format", "group", "scale"), CASES)
def test_weights_mean_their_scale_times_code_less_zero(
    dtype: torch.dtype, format: str, group: int | None, scale: torch.dtype
) -> None:
    weight, exact = sample(format, group, scale, activations=activations_of(dtype))
    a = random(5, K, dtype=dtype)
    d = warploom.mixed_gemm(a, weight, out_dtype=FP32)
    expected = a.double() @ exact.t()
    assert d.dtype == FP32 and d.shape == (5, N)
    torch.testing.assert_close(d.double(), expected, rtol=2.0**-23, atol=0)


def test_the_result_is_of_the_activations_type_or_bf16() -> None:
    assert warploom.mixed_gemm(random(3, K, dtype=FP16), sample().packed).dtype == FP16
    for dtype in (E4M3, torch.int8):
        weight = sample(activations=activations_of(dtype)).packed
        assert warploom.mixed_gemm(random(3, K, dtype=dtype), weight).dtype == BF16


def test_the_epilogue_is_that_of_gemm() -> None:
    """Every keyword, in gemm's order; and outputs of steps, and a list in another order."""
    weight, exact = sample()
    a, w = random(4, K, dtype=BF16), exact.float()
    bias, residual = random(N, seed=2), random(4, N, seed=3)
    amax, other = torch.zeros(1), torch.zeros(1)
    keywords: dict[str, Any] = {
        "bias": bias,
        "residual": residual,
        "beta": 0.5,
        "activation": "silu",
        "scale_a": torch.rand(4) + 0.5,
        "scale_d": 2.0,
        "out_dtype": FP32,
    }
    d = warploom.mixed_gemm(a, weight, **keywords, amax=amax)
    expected = warploom.gemm(a.float().half().bfloat16(), w.t().bfloat16(), **keywords, amax=other)
    torch.testing.assert_close(d, expected, rtol=2e-2, atol=2e-1)
    torch.testing.assert_close(amax, d.abs().max()[None] / 2)
    z = torch.empty(4, N)
    steps = [("activation", "relu"), ("preactivation", z), ("bias", bias)]
    d = warploom.mixed_gemm(a, weight, epilogue=steps, out_dtype=FP32)
    torch.testing.assert_close(z, (a.double() @ exact.t()).relu().float())
    assert torch.equal(d, z + bias.float())


def test_beta_1_without_a_residual_is_a_call_without_epilogue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A 1.0 that was written out took the way of calls with an epilogue, which is longer."""
    a, weight = random(4, K, dtype=BF16), sample()[0]
    expected = warploom.mixed_gemm(a, weight)
    monkeypatch.setattr(api, "epilogue_items", None)
    assert torch.equal(warploom.mixed_gemm(a, weight, beta=float("1")), expected)


def test_batches_are_rows_of_one_product() -> None:
    weight, _ = sample()
    a, residual = random(2, 3, 4, K), random(2, 3, 4, N, seed=2)
    rows = torch.rand(2, 3, 4)
    steps = [("scale_row", rows), ("residual", residual, 1.0)]
    d = warploom.mixed_gemm(a, weight, epilogue=steps)
    flat = [("scale_row", rows.flatten()), ("residual", residual.reshape(24, N), 1.0)]
    expected = warploom.mixed_gemm(a.reshape(24, K), weight, epilogue=flat)
    assert torch.equal(d.reshape(24, N), expected)


def test_out_is_written_and_may_be_the_residual() -> None:
    weight, _ = sample()
    a, residual = random(4, K), random(4, N, seed=2)
    expected = warploom.mixed_gemm(a, weight, residual=residual)
    wide = torch.zeros(4, 2 * N, dtype=BF16)
    found = warploom.mixed_gemm(a, weight, residual=residual, out=wide[:, :N])
    assert torch.equal(found, expected) and wide[:, N:].count_nonzero() == 0
    assert warploom.mixed_gemm(a, weight, residual=residual, out=residual) is residual
    assert torch.equal(residual, expected)


def test_activations_that_lie_anyhow_and_none_at_all() -> None:
    weight, _ = sample()
    a = random(4, K)
    expected = warploom.mixed_gemm(a, weight)
    assert torch.equal(warploom.mixed_gemm(a.t().contiguous().t(), weight), expected)
    assert torch.equal(warploom.mixed_gemm(a[:1].expand(4, K), weight)[3:], expected[:1])
    assert warploom.mixed_gemm(a[:0], weight).shape == (0, N)


def test_autocast_lowers_activations() -> None:
    weight, _ = sample()
    a = random(4, K, dtype=FP32)
    with torch.autocast("cpu", dtype=BF16):
        found = warploom.mixed_gemm(a, weight)
    assert torch.equal(found, warploom.mixed_gemm(a.to(BF16), weight))


def test_a_kind_of_call_is_planned_once() -> None:
    """Weights of one kind share a plan; another format, or other activations, are another."""
    before = warploom.counters.plans
    a = random(11, K)
    for seed in range(3):
        warploom.mixed_gemm(a, sample(seed=seed).packed)
    assert warploom.counters.plans == before + 1
    warploom.mixed_gemm(a, sample(group=64).packed)
    assert warploom.counters.plans == before + 2
