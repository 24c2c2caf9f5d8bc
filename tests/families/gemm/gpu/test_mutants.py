"""Kernels without one of their barriers, and what sanitizers say of those that have them."""

from __future__ import annotations

import subprocess
import sys

import gemm_arena as arena
import gemm_mutants
import gemm_sanitized
import pytest
from processes import TOOLS, Note, assert_nothing_found, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


@pytest.mark.parametrize("name", gemm_mutants.MUTANTS)
def test_a_kernel_without_one_of_its_barriers_is_caught(name: str, note: Note) -> None:
    chosen = gemm_mutants.MUTANTS[name]
    arena.verify(arena.call(chosen.kernel, *chosen.shape))
    try:
        done = run(sys.executable, str(gemm_mutants.__file__), name, timeout=100)
    except subprocess.TimeoutExpired:
        note(f"mutants.{name}", "hung")
        return
    assert done.returncode in (0, 1), done.stderr
    note(f"mutants.{name}", done.stdout.strip())
    assert done.returncode == 0, f"{name}: {done.stdout}"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_that_runs_finds_nothing(tool: str, note: Note) -> None:
    assert_nothing_found(tool, gemm_sanitized.__file__, note)
