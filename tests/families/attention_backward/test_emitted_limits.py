"""What is launched is counted in 32 bits, and hardly more is refused: by the emitted text.

It runs on the CPU, at the largest problems that launches let through and at those just beyond.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from attention_backward_text import host_text
from attention_bounds import BOUNDS
from edges import H200, counts, largest
from host import build, needs_compiler

from warploom.generator.families import family
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardProblem,
    AttentionBackwardSchedule,
)
from warploom.generator.shapes import LARGEST
from warploom.generator.specification import KernelSpec

pytestmark = needs_compiler
HARNESS = Path(__file__).with_name("limits.cpp")
LINE = (64, 64, 64)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])
@pytest.mark.parametrize("lengths", ["fixed", "packed"])
@pytest.mark.parametrize("mask", BOUNDS)
def test_lengths_whose_gradients_are_launched_are_reckoned_with(
    mask: str, lengths: str, deterministic: bool, tmp_path: Path
) -> None:
    operation = AttentionBackwardOperation(
        "bf16",
        192,
        mask,  # type: ignore[arg-type]
        lengths=lengths,  # type: ignore[arg-type]
        deterministic=deterministic,
    )
    schedule = AttentionBackwardSchedule(64, 128, 1, overlap=False)
    spec = KernelSpec("sm_90a", operation, schedule)
    program = build(host_text(spec, HARNESS), tmp_path)
    packed = lengths == "packed"
    for left, right in BOUNDS[mask]:
        few = AttentionBackwardProblem(
            1, 2, 2, 8, 8, 192, 8, 8, LINE, LINE, LINE, LINE, left, right,
            strides_do=LINE, strides_dq=LINE, strides_dk=LINE, strides_dv=LINE,
        )  # fmt: skip
        for fields in (("q",), ("k",), ("q", "k")):
            names = [f"total_{side}" for side in fields]
            names += [] if packed else [f"seq_{side}" for side in fields]
            edge = largest(spec, few, *names)
            problem = replace(few, **dict.fromkeys(names, edge))
            _, launch, _ = family("attention_backward").launches(spec, problem, H200)
            counted = ("all_kv_heads", "sharing", "q_tiles", "kv_tiles")
            told = [launch.parameters[name] for name in counted]
            line = (problem.total_q, problem.total_k, *told, left, right)
            assert counts(program, " ".join(map(str, line))), line
    beyond = f"8 {LARGEST} 1 1 {2 if packed else 1} {2**24}"
    assert not counts(program, f"{beyond} {left} {right}")  # else nothing is seen here
