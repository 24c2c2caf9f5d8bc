"""Kernels on operands and gradients with dimensions of size 1 and 0, in every view of them."""

from __future__ import annotations

import gemm_odd_views as odd
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize(("m", "n"), odd.SHAPES)]
K = 16


def test_operands_in_any_view_give_exact_results(m: int, n: int) -> None:
    """A stride of a dimension of size 1 is a pitch of nothing."""
    odd.operands_give_exact_results(m, n, K, "cuda")


@pytest.mark.parametrize("epilogue", odd.EPILOGUES)
def test_gradients_of_any_view_are_exact(m: int, n: int, epilogue: str) -> None:
    """The gradient of a sum is expanded, of size 1 too."""
    odd.gradients_of_gemm_are_exact(m, n, K, "cuda", epilogue)


def test_gradients_of_a_layer_of_any_view_are_exact(m: int, n: int) -> None:
    """The same by plans that a layer keeps."""
    odd.gradients_of_a_layer_are_exact(m, n, K, "cuda")
