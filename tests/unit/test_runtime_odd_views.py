"""Calls of operands with dimensions of size 1 and 0, in every view that torch has of them."""

from __future__ import annotations

import odd_calls
import pytest


@pytest.mark.parametrize("shape", odd_calls.SHAPES)
def test_any_view_gives_the_result_of_a_dense_tensor(shape: tuple[int, int, int, int, int]) -> None:
    """Strides of dimensions of size 1 say nothing of where elements are."""
    for case in odd_calls.cases(shape, "cpu").values():
        odd_calls.any_view_gives_the_result_of_a_dense_tensor(case)
