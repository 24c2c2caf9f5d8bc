"""Random kernels on random problems, 2,000 of them."""

from __future__ import annotations

import decode_arena as arena
import decode_drawn as drawn
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


@pytest.mark.parametrize("first", range(0, drawn.PROBLEMS, drawn.TOGETHER))
def test_no_table_no_length_and_no_order_of_pages_is_wrong(first: int) -> None:
    for index in range(first, first + drawn.TOGETHER):
        kernel, shape, lengths = drawn.problem(index)
        try:
            arena.verify(arena.call(kernel, shape, lengths=lengths, seed=index))
        except AssertionError as error:
            told = f"seed {drawn.SEED}, problem {index}: {kernel.name} {shape} {lengths}"
            raise AssertionError(f"{told}: {error}") from error
