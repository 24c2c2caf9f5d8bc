"""Kernels that are wrong in one place, and what sanitizers say of right ones."""

from __future__ import annotations

import dequantize_sanitized
import mutants
import pytest
from dequantize_mutants import MUTANTS
from processes import TOOLS, Note, assert_nothing_found

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_that_is_wrong_in_one_place_is_caught(name: str, note: Note) -> None:
    found = mutants.outcome(MUTANTS[name])
    note(f"mutants.{name}", found)
    assert found == "caught"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_that_runs_finds_nothing(tool: str, note: Note) -> None:
    assert_nothing_found(tool, dequantize_sanitized.__file__, note)
