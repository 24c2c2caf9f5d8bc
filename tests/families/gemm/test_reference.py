"""The bound that kernels are held to: wide enough for a right result, too tight for a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom.runtime.accumulation import accumulated
from warploom.runtime.elements import TORCH, unit_roundoff
from warploom.runtime.families.gemm import reference

STEP = {"fp16": 16, "bf16": 16, "e4m3": 32, "int8": 32}  # products of one wgmma along k
PAIRS = [
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("bf16", "fp32"),
    ("e4m3", "bf16"),
    ("int8", "int32"),
    ("int8", "bf16"),
]


def operands(a_type: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    if a_type == "int8":
        return (
            torch.randint(-128, 128, (m, k), generator=generator).to(torch.int8),
            torch.randint(-128, 128, (k, n), generator=generator).to(torch.int8),
        )
    values = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    return values[0].to(TORCH[a_type]), values[1].to(TORCH[a_type])


def within(d: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return (d.double() - exact).abs() <= bound


@pytest.mark.parametrize(("a_type", "d_type"), PAIRS)
@pytest.mark.parametrize("k", [1, 193, 1021])
def test_the_bound_holds_for_a_result_that_is_right(a_type: str, d_type: str, k: int) -> None:
    a, b = operands(a_type, 67, 51, k)
    exact, bound = reference.gemm_bound(a, b, [], TORCH[d_type])
    assert within(reference.gemm(a, b, [], TORCH[d_type]), exact, bound).all()
    assert d_type != "int32" or bound.max() == 0


@pytest.mark.parametrize(("a_type", "d_type"), PAIRS)
@pytest.mark.parametrize("k", [193, 1021])
def test_the_bound_fails_a_result_without_its_last_k_step(a_type: str, d_type: str, k: int) -> None:
    a, b = operands(a_type, 67, 51, k)
    exact, bound = reference.gemm_bound(a, b, [], TORCH[d_type])
    kept = k - STEP[a_type]
    wrong = reference.gemm(a[:, :kept], b[:kept], [], TORCH[d_type])
    # Fast e4m3 sums keep few bits: of a long sum, most elements still show the missing step.
    assert within(wrong, exact, bound).double().mean() < (0.9 if a_type == "e4m3" else 0.1)


@pytest.mark.parametrize(("a_type", "d_type"), PAIRS)
def test_the_bound_fails_two_fragments_in_each_others_place(a_type: str, d_type: str) -> None:
    a, b = operands(a_type, 64, 64, 1021)
    exact, bound = reference.gemm_bound(a, b, [], TORCH[d_type])
    d = reference.gemm(a, b, [], TORCH[d_type])
    swapped = d.clone()
    swapped[8:16, 16:24], swapped[8:16, 24:32] = d[8:16, 24:32], d[8:16, 16:24]
    wrong = ~within(swapped, exact, bound)
    assert wrong[8:16, 16:32].double().mean() > 0.5
    assert wrong.sum() == wrong[8:16, 16:32].sum()


EPILOGUES: dict[str, list[tuple[Any, ...]]] = {
    "scales": [("scale", 0.1), ("scale", torch.tensor([-3.0]))],
    "vectors": [("scale_row", torch.linspace(-2, 2, 67)), ("scale_column", torch.ones(51))],
    "layer": [("bias", torch.randn(51)), ("activation", "gelu_tanh"), ("scale", 1e-3)],
    "functions": [("activation", "gelu"), ("activation", "silu"), ("activation", "relu")],
    "residual": [("residual", torch.randn(67, 51).bfloat16(), 0.1)],
}


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("a_type", ["fp16", "int8"])
def test_the_bound_follows_every_step_of_an_epilogue(name: str, a_type: str) -> None:
    a, b = operands(a_type, 67, 51, 193)
    listed = EPILOGUES[name]
    exact, bound = reference.gemm_bound(a, b, listed, torch.float32)
    d = reference.gemm(a, b, listed, torch.float32)
    assert within(d, exact, bound).all()
    assert within(d + 1e-3 * d.abs() + 0.1, exact, bound).double().mean() < 0.05


def test_a_residual_of_nan_is_outside_the_bound_unless_beta_is_0() -> None:
    a, b = operands("bf16", 5, 7, 16)
    nan = torch.full((5, 7), torch.nan)
    for beta, expected in ((0.0, True), (1.0, False)):
        exact, bound = reference.gemm_bound(a, b, [("residual", nan, beta)], torch.bfloat16)
        assert bool(within(exact.bfloat16(), exact, bound).all()) is expected


def test_the_roundoff_of_integers_is_none() -> None:
    assert unit_roundoff(torch.int32) == 0
    assert unit_roundoff(torch.bfloat16) == 2.0**-8
    assert unit_roundoff(torch.float16) == 2.0**-11
    assert accumulated(torch.int8, 10**6) == 0
    assert accumulated(torch.float16, 33) == 3 * 2.0**-22
