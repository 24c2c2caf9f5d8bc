"""A call that is new is planned and launched in few steps: what nobody can follow, nobody mends."""

from __future__ import annotations

import operator

import torch
from cold_calls import counts, walk
from cold_calls import launched as launched

import warploom
from warploom.runtime import plan

# Of a call whose operation and shape have a record, and whose kernel is built; lower them with it.
MOST = 37, 242, 545  # files, functions, calls


def test_a_new_call_reads_down(launched: list[int]) -> None:
    q, k = torch.zeros(1, 64, 1024, 128).bfloat16(), torch.zeros(1, 8, 1024, 128).bfloat16()
    other = torch.zeros(1, 8, 128, 64).bfloat16()
    warploom.attention(other, other, other)  # records are read
    before = len(launched)
    steps = walk(lambda: warploom.attention(q, k, k, causal=True))
    assert len(launched) == before + 1
    (planned,) = [made for made in plan.known.values() if made.details.sizes.heads == 64]
    assert planned.choice.asked.recorded
    assert all(map(operator.le, counts(steps), MOST)), counts(steps)
