"""A call that is new is planned and launched in few steps: what nobody can follow, nobody mends."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from cold_calls import new_call_counts

import warploom

# Of a call whose operation and shape have a record, and whose kernel is built; lower them with it.
RECORDED = True
MOST = 37, 199, 436  # files, functions, calls


def calls() -> tuple[Callable[[], object], Callable[[], object]]:
    q, k = torch.zeros(1, 64, 1024, 128).bfloat16(), torch.zeros(1, 8, 1024, 128).bfloat16()
    other = torch.zeros(1, 8, 128, 64).bfloat16()
    return (
        lambda: warploom.attention(other, other, other),
        lambda: warploom.attention(q, k, k, causal=True),
    )


def test_a_new_call_reads_down() -> None:
    counts = new_call_counts(__file__)
    assert all(map(operator.le, counts, MOST)), counts
