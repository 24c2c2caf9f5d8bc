"""What is launched is counted in 32 bits, and hardly more is refused: by the emitted text.

It runs on the CPU, at the largest problems that launches let through and at those just beyond.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from attention_bounds import BOUNDS
from attention_text import host_text
from edges import H200, counts, largest
from host import build, needs_compiler

from warploom.generator.families import family
from warploom.generator.families.attention_forward import (
    AttentionOperation,
    AttentionProblem,
    AttentionSchedule,
)
from warploom.generator.shapes import LARGEST
from warploom.generator.specification import KernelSpec

pytestmark = needs_compiler
HARNESS = Path(__file__).with_name("limits.cpp")
LINE = (64, 64, 64)


@pytest.mark.parametrize("lengths", ["fixed", "packed"])
@pytest.mark.parametrize("mask", BOUNDS)
def test_lengths_that_are_launched_are_reckoned_with(
    mask: str, lengths: str, tmp_path: Path
) -> None:
    operation = AttentionOperation("bf16", 64, mask, lengths=lengths)  # type: ignore[arg-type]
    schedule = AttentionSchedule(128, 96)
    spec = KernelSpec("sm_90a", operation, schedule)
    program = build(host_text(spec, HARNESS), tmp_path)
    packed = lengths == "packed"
    for left, right in BOUNDS[mask]:
        few = AttentionProblem(1, 2, 2, 8, 8, 64, 8, 8, LINE, LINE, LINE, LINE, left, right)
        for fields in (("q",), ("k",), ("q", "k")):
            names = [f"total_{side}" for side in fields]
            names += [] if packed else [f"seq_{side}" for side in fields]
            edge = largest(spec, few, *names)
            problem = replace(few, **dict.fromkeys(names, edge))
            (launch,) = family("attention_forward").launches(spec, problem, H200)
            told = [launch.parameters[name] for name in ("all_heads", "q_tiles", "section")]
            line = (problem.total_q, problem.total_k, *told, left, right)
            assert counts(program, " ".join(map(str, line))), line
    beyond = f"8 {LARGEST} 2 1 2" if packed or mask == "none" else f"{LARGEST} 8 2 {2**24} 2"
    assert not counts(program, f"{beyond} {left} {right}")  # else nothing is seen here
