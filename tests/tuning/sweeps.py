"""A small space, and sweeps of a GPU that is made up.

Times follow the model's start with a part of their own for each schedule, which no model knows, so
that a search has something to find.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.records import Environment
from warploom.generator.specification import KernelSpec
from warploom.tuning.journal import Entry, Journal, Outcome, Result
from warploom.tuning.problems import Problem, default

GPU, MULTIPROCESSORS = "NVIDIA H200", 132
SPACE = """\
version: 1
arch: sm_90a
kernels:
  - operations: [{family: gemm, a: bf16, b: bf16, d: bf16}]
    schedules:
      - tile: [[64, 32, 64], [64, 64, 64], [64, 128, 64], [128, 64, 64], [128, 128, 64],
               [128, 160, 64], [128, 192, 64], [128, 256, 64], [256, 96, 64], [256, 128, 64]]
        cluster: [[1, 1], [2, 1], [1, 2]]
        consumers: [1, 2]
        kernel_schedule: [cooperative, pingpong]
"""
SHAPES = ("16x6144x4096", "512x6144x4096", "4096x4096x4096")
Fate = Callable[[KernelSpec], Outcome]


def environment(name: str = "gemm", gpu: str = GPU) -> Environment:
    return Environment(gpu, MULTIPROCESSORS, "13.0", family(name).revision)


def own_share(text: str) -> float:
    """A number in [0, 1) that nothing but `text` decides."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def default_of(problem: Problem) -> KernelSpec:
    device = DeviceLimits(MULTIPROCESSORS, GPU)
    return default(problem.operation, problem.shape, device)


def swept_seconds(problem: Problem, spec: KernelSpec, roughness: float = 0.05) -> float:
    known = family(problem.operation.family)
    asked = (problem.operation, spec.schedule, problem.shape, MULTIPROCESSORS)
    smooth = known.seconds(known.constants, *asked)
    return smooth * (1 + roughness * own_share(f"{spec.name} {problem.shape!r}"))


def entries(
    problem: Problem, fate: Fate = lambda spec: "correct", roughness: float = 0.05
) -> list[Entry]:
    """A sweep of one problem: every point of its space, and the default."""
    here = environment(problem.operation.family)
    specs = list(dict.fromkeys([default_of(problem), *problem.space]))
    base = swept_seconds(problem, specs[0], roughness)
    found = []
    for spec in specs:
        outcome = fate(spec)
        taken = swept_seconds(problem, spec, roughness)
        result = (
            Result(spec.schedule, "correct", taken, 0.004, taken / base, 0.0013)
            if outcome == "correct"
            else Result(spec.schedule, outcome, reason="as the sweep has it")
        )
        found.append(Entry(problem.operation, problem.shape, here, result))
    return found


def write_sweep(path: Path, listed: Sequence[Problem], fate: Fate = lambda spec: "correct") -> Path:
    """Write the sweep of several problems as a journal."""
    journal = Journal(path)
    for problem in listed:
        for entry in entries(problem, fate):
            journal.add(entry)
    journal.close()
    return path
