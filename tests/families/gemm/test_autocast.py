"""Autocast lowers a gemm's operands as torch's own, and nothing that the reference computes in."""

from __future__ import annotations

import pytest
import torch

import warploom

X, W = torch.randn(5, 64), torch.randn(8, 64)
OFF = torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize("operands", ["16 bits", "8 bits", "no products"])
def test_the_reference_computes_in_fp32_under_autocast(operands: str) -> None:
    dtype = torch.float8_e4m3fn if operands == "8 bits" else torch.bfloat16
    k = 0 if operands == "no products" else 64
    a, b = X[:, :k].to(dtype), W[:, :k].to(dtype).t()
    keywords = {"out_dtype": torch.float32, "scale_a": 1.0, "bias": torch.randn(8)}
    expected = warploom.gemm(a, b, **keywords)
    plan = warploom.plan(a, b, **keywords)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(warploom.gemm(a, b, **keywords), expected)
        assert torch.equal(plan(a, b, scale_a=1.0, bias=keywords["bias"]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_operands_are_lowered_to_the_type_of_autocast(dtype: torch.dtype, compiled: bool) -> None:
    call = torch.compile(warploom.gemm, backend="eager") if compiled else warploom.gemm
    expected = warploom.gemm(X.to(dtype), W.to(dtype).t())
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(call(X, W.t()), expected)
        assert call(X.to(torch.bfloat16), W.t()).dtype == torch.mm(X, W.t()).dtype == dtype
        with OFF:
            assert call(X.half(), W.half().t()).dtype == torch.float16
