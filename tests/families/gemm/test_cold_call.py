"""A call that is new is planned and launched in few steps: what nobody can follow, nobody mends."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from cold_calls import new_call_counts

import warploom

# Of a call whose operation and shape have a record, and whose kernel is built; lower them with it.
# Files, functions, calls: after a call that is like it but for its shape.
RECORDED = True
MOST = 33, 167, 282


def calls() -> tuple[Callable[[], object], Callable[[], object]]:
    a, weight = torch.zeros(64, 8192).bfloat16(), torch.zeros(1280, 8192).bfloat16()
    x, other = torch.zeros(128, 4096).bfloat16(), torch.zeros(4096, 4096).bfloat16()
    return lambda: warploom.gemm(x, other.t()), lambda: warploom.gemm(a, weight.t())


def test_a_new_call_reads_down() -> None:
    counts = new_call_counts(__file__)
    assert all(map(operator.le, counts, MOST)), counts
