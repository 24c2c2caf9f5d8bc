"""A call that is new is planned and launched in few steps: what nobody can follow, nobody mends."""

from __future__ import annotations

import operator

import torch
from cold_calls import counts, walk
from cold_calls import launched as launched

import warploom
from warploom.runtime import plan

# Of a call whose operation and shape have a record, and whose kernel is built; lower them with it.
# Files, functions, calls: after a call that is like it but for its shape.
MOST = 38, 204, 352


def test_a_new_call_reads_down(launched: list[int]) -> None:
    a, weight = torch.zeros(64, 8192).bfloat16(), torch.zeros(1280, 8192).bfloat16()
    other = torch.zeros(128, 4096).bfloat16(), torch.zeros(4096, 4096).bfloat16()
    warploom.gemm(other[0], other[1].t())  # records are read
    before = len(launched)
    steps = walk(lambda: warploom.gemm(a, weight.t()))
    assert len(launched) == before + 1
    (planned,) = [made for made in plan.known.values() if made.details.problem.n == 1280]
    assert planned.choice.asked.recorded
    assert all(map(operator.le, counts(steps), MOST)), counts(steps)
