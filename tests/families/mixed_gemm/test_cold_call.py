"""A call that is new is planned and launched in few steps: what nobody can follow, nobody mends."""

from __future__ import annotations

import operator

import torch
from cold_calls import counts, walk
from cold_calls import launched as launched

import warploom
from warploom.quantization import PackedWeight
from warploom.runtime import plan

# Of a call that the default table has a kernel for, which is built; lower them with it.
# Files, functions, calls: after a call that is like it but for its shape.
MOST = 45, 275, 2081


def weight(n: int) -> PackedWeight:
    values = torch.randn(n, 4096, generator=torch.Generator().manual_seed(0))
    return warploom.quantize(values, "int4", group=128, activations="e4m3")


def test_a_new_call_reads_down(launched: list[int]) -> None:
    a = torch.zeros(128, 4096).to(torch.float8_e4m3fn)
    one, other = weight(4096), weight(1024)
    warploom.mixed_gemm(a, other)  # records and the table are read
    before = len(launched)
    steps = walk(lambda: warploom.mixed_gemm(a[:64], one))
    assert len(launched) == before + 1
    (planned,) = [made for made in plan.known.values() if made.details.problem.n == 4096]
    assert planned.choice.asked is not None
    assert not planned.choice.asked.recorded
    assert all(map(operator.le, counts(steps), MOST)), counts(steps)
