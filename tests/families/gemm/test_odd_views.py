"""Operands and gradients with dimensions of size 1 and 0, in every view that torch has of them.

The backward pass called itself without end where a dimension of size 1 had another stride than 1,
as in attention pooling (a layer of one column, then a transpose) and in a value head of one row.
"""

from __future__ import annotations

import gemm_odd_views as odd
import pytest
import torch

import warploom

pytestmark = pytest.mark.parametrize("k", odd.DEPTHS)
SHAPES = pytest.mark.parametrize(("m", "n"), odd.SHAPES)


@SHAPES
def test_operands_in_any_view_give_exact_results(m: int, n: int, k: int) -> None:
    odd.operands_give_exact_results(m, n, k, "cpu")


@pytest.mark.parametrize("epilogue", odd.EPILOGUES)
@SHAPES
def test_gradients_of_any_view_are_exact(m: int, n: int, k: int, epilogue: str) -> None:
    odd.gradients_of_gemm_are_exact(m, n, k, "cpu", epilogue)


@SHAPES
def test_gradients_of_a_layer_of_any_view_are_exact(m: int, n: int, k: int) -> None:
    """That of a weight of one row, or none, had its transpose's shape."""
    activation = "relu" if k > 1 else None  # which decides what dd is, not how its views are read
    odd.gradients_of_a_layer_are_exact(m, n, k, "cpu", [activation])


def test_attention_pooling_trains(k: int) -> None:
    """softmax(score(x).transpose(1, 2)) @ x, with a score of one column."""
    x = torch.randn(2, 5, k).bfloat16()
    found = []
    for function in (torch.nn.functional.linear, lambda x, w: warploom.gemm(x, w.t())):
        weight = torch.full((1, k), 0.5).bfloat16().requires_grad_()
        weights = torch.softmax(function(x, weight).transpose(1, 2), -1)
        torch.bmm(weights, x).float().square().sum().backward()
        found.append(weight.grad)
    assert found[0] is not None
    assert found[1] is not None
    torch.testing.assert_close(found[1], found[0], rtol=5e-2, atol=5e-2)
