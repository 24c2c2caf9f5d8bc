"""A call that is new is planned and launched in few steps: what nobody can follow, nobody mends."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from cold_calls import new_call_counts

import warploom
from warploom.quantization import PackedWeight

# Of a call that the default table has a kernel for, which is built; lower them with it.
# Files, functions, calls: after a call that is like it but for its shape.
RECORDED = False
MOST = 42, 232, 2430


def weight(n: int) -> PackedWeight:
    values = torch.randn(n, 4096, generator=torch.Generator().manual_seed(0))
    return warploom.quantize(values, "int4", group=128, activations="e4m3")


def calls() -> tuple[Callable[[], object], Callable[[], object]]:
    a = torch.zeros(128, 4096).to(torch.float8_e4m3fn)
    one, other = weight(4096), weight(1024)
    return lambda: warploom.mixed_gemm(a, other), lambda: warploom.mixed_gemm(a[:64], one)


def test_a_new_call_reads_down() -> None:
    counts = new_call_counts(__file__)
    assert all(map(operator.le, counts, MOST)), counts
