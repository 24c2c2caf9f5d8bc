"""What is launched is counted in 32 bits, and hardly more is refused: by the emitted text.

It runs on the CPU, at the largest problems that launches let through and at those just beyond.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_attention_backward_ranges as attention_backward_ranges
import test_attention_ranges as attention_ranges
from host import build, needs_compiler

from warploom.errors import ProblemError
from warploom.generator.families import family
from warploom.generator.families._attention import UNBOUNDED
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardProblem,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_forward import (
    AttentionOperation,
    AttentionProblem,
    AttentionSchedule,
)
from warploom.generator.families.gemm import GemmOperation, GemmProblem, complete, tiles
from warploom.generator.launches import DeviceLimits
from warploom.generator.limits import LARGEST
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec

pytestmark = needs_compiler
GEMM = Path(__file__).with_name("gemm_limits.cpp")
ATTENTION = Path(__file__).with_name("attention_limits.cpp")
BACKWARD = Path(__file__).with_name("attention_backward_limits.cpp")
Problem = GemmProblem | AttentionProblem
H200 = DeviceLimits(132)
STUBS = """
using std::min;
#define __device__
#define __forceinline__ inline
"""
SCHEDULES: dict[str, dict[str, Any]] = {
    "cluster": {"tile": (128, 256, 64), "cluster": (2, 1)},
    "along n": {"tile": (128, 128, 64), "cluster": (1, 2), "raster": "along_n"},
    "pingpong": {"tile": (128, 128, 64), "roles": "pingpong"},
    "split": {"tile": (64, 96, 64), "consumers": 1, "split": 4},
    "group": {"tile": (64, 8, 64), "consumers": 1, "group": 1024, "store": "direct"},
}


def counts(program: Path, line: str) -> bool:
    """Whether the program comes to its end."""
    done = subprocess.run([str(program)], input=line, text=True, check=False)
    assert done.returncode <= 0, "a place is wrong"
    return done.returncode == 0


def gemm_text(spec: KernelSpec) -> str:
    text = render(spec)
    (k_tiles, _) = re.findall(r"const int k_tiles = (.*);", text)
    batched = spec.operation.batched  # type: ignore[union-attr]
    return "\n".join(
        (
            STUBS,
            "struct Parameters { int m, n, k, batches; };",
            *(["#define BATCHED"] if batched else []),
            *([] if "int kSplit" in text else ["constexpr int kSplit = 1;"]),
            *re.findall(
                r"^constexpr int k(?:Tile|Cluster|Split|Consumers|Sharing|Turns|Group).*?$",
                text,
                re.M,
            ),
            *re.findall(r"^struct (?:Place|Tiles) \{.*?^\};", text, re.M | re.S),
            f"static int k_tiles(const Parameters& p) {{ return {k_tiles}; }}",
            f'#line 1 "{GEMM}"',
            GEMM.read_text(),
        )
    )


def accepted(spec: KernelSpec, problem: Problem) -> bool:
    try:
        family(spec.operation.family).launches(spec, problem, H200)
    except ProblemError:
        return False
    return True


def largest(spec: KernelSpec, problem: Problem, *fields: str) -> int:
    """The largest value of some fields that is launched."""
    low, high = 1, LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        fits = accepted(spec, replace(problem, **dict.fromkeys(fields, middle)))
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_product_that_is_launched_is_counted_and_one_beyond_is_not(
    schedule: str, batched: bool, tmp_path: Path
) -> None:
    operation = GemmOperation("bf16", "bf16", "bf16", batched=batched)
    spec = KernelSpec("sm_90a", operation, complete("sm_90a", operation, dict(SCHEDULES[schedule])))
    program = build(gemm_text(spec), tmp_path)
    found: Any = spec.schedule
    m, n, k = found.tile
    beside = {
        "m": 2 * m * found.cluster[0],
        "n": 2 * max(n * found.cluster[1], 8),
        "k": 2 * k * found.split,
        "batches": 2 * 2 * 132,
    }

    def runs(problem: GemmProblem) -> bool:
        clusters = min(tiles(found, problem), H200.clusters(found.cluster_size))
        fields = (problem.m, problem.n, problem.k, problem.batches, clusters)
        return counts(program, " ".join(map(str, fields)))

    for base in ((1, 1, 64), (5000, 7, 64), (7, 5000, 64), (2**19, 2**19, 64)):
        problem = GemmProblem(*base, pitch_a=64, pitch_b=64, pitch_d=8)
        for field in ("m", "n", "k", *(("batches",) if batched else ())):
            edge = largest(spec, problem, field)
            assert runs(replace(problem, **{field: edge})), (base, field, edge)
            if edge + beside[field] <= LARGEST:
                beyond = replace(problem, **{field: edge + beside[field]})
                assert not runs(beyond), (base, field, edge)


# ---- Attention -----------------------------------------------------------------------------------

LINE = (64, 64, 64)
BOUNDS = {  # left and right of a mask
    "none": [(UNBOUNDED, UNBOUNDED)],
    "causal": [(UNBOUNDED, 0), (UNBOUNDED, 2**30 - 1), (UNBOUNDED, -(2**30) + 5)],
    "window": [(70, 5), (2**30 - 1, 2**30 - 1), (-(2**30) + 70, 2**30 - 5), (UNBOUNDED, 0)],
}


@pytest.mark.parametrize("lengths", ["fixed", "packed"])
@pytest.mark.parametrize("mask", BOUNDS)
def test_lengths_that_are_launched_are_reckoned_with(
    mask: str, lengths: str, tmp_path: Path
) -> None:
    operation = AttentionOperation("bf16", 64, mask, lengths=lengths)  # type: ignore[arg-type]
    schedule = AttentionSchedule(128, 96)
    spec = KernelSpec("sm_90a", operation, schedule)
    text = attention_ranges.host_text(spec)
    text = text.replace(attention_ranges.HARNESS.read_text(), ATTENTION.read_text())
    program = build(text.replace(attention_ranges.HARNESS.name, ATTENTION.name), tmp_path)
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
    text = attention_backward_ranges.host_text(spec)
    text = text.replace(attention_backward_ranges.HARNESS.read_text(), BACKWARD.read_text())
    program = build(text.replace(attention_backward_ranges.HARNESS.name, BACKWARD.name), tmp_path)
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
