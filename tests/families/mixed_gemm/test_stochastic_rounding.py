"""Stochastic rounding of products of quantized weights, as `warploom.gemm` rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError


def test_a_quantized_weight_is_rounded_as_its_values_are() -> None:
    torch.manual_seed(0)
    a = torch.randint(-3, 4, (9, 64)).bfloat16()
    weight = warploom.quantize(torch.randn(48, 64).bfloat16(), "int4", group=64)
    words: Any = {"rounding": "stochastic", "rounding_state": torch.tensor([1, 2])}
    wide = warploom.mixed_gemm(a, weight, out_dtype=torch.float32)
    d = warploom.mixed_gemm(a, weight, **words)
    assert torch.equal(d, warploom.mixed_gemm(a, weight, **words))
    below = (wide.view(torch.int32) & ~0xFFFF).view(torch.float32)
    above = (below.view(torch.int32) + (1 << 16)).view(torch.float32)
    assert ((d.float() == below) | (d.float() == above)).all()
    listed: list[Any] = [("stochastic_rounding", words["rounding_state"])]
    assert torch.equal(d, warploom.mixed_gemm(a, weight, epilogue=listed))
    with pytest.raises(ProblemError, match="d behind stochastic_rounding 'fp32'"):
        warploom.mixed_gemm(a, weight, out_dtype=torch.float32, **words)


def test_gradients_pass_straight_through() -> None:
    weight = warploom.quantize(torch.randn(48, 64).bfloat16(), "int4", group=64)
    x = torch.randn(9, 64).bfloat16()
    found = []
    for words in ({}, {"rounding": "stochastic"}):
        leaf = x.clone().requires_grad_()
        warploom.mixed_gemm(leaf, weight, activation="silu", **words).float().sum().backward()  # type: ignore[arg-type]
        found.append(leaf.grad)
    torch.testing.assert_close(*found)
