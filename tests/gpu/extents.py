"""Extents near 2^31: tensors that take no memory, and how a call of too large ones is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import warploom
from warploom.errors import ProblemError

Refused = dict[str, tuple[Callable[[], Callable[[], object]], str]]


def one(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of ones, all of them one element in memory."""
    return torch.ones((1,) * len(shape), device="cuda").to(dtype).expand(shape)


def count_other(tensor: torch.Tensor, value: float) -> int:
    """How many elements of a long tensor are something else; NaN is."""
    chunks = tensor.reshape(-1).split(1 << 28)
    return sum(int((chunk != value).sum()) for chunk in chunks)


def assert_refused(make: Callable[[], Callable[[], object]], said: str) -> None:
    """Assert that the call that `make` makes is refused before anything is made for it.

    What is refused is refused before memory is taken, so that its tensors may be views of one
    element.
    """
    call = make()
    before, taken = warploom.counters.as_dict(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        with pytest.raises(ProblemError, match="must be smaller: kernels count to") as told:
            call()
        assert said in told.value.value
    assert warploom.counters.as_dict() == before
    assert torch.cuda.max_memory_allocated() - taken < 1 << 20
