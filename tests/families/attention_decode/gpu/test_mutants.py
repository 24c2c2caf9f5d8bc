"""Kernels that are wrong in one place, and what sanitizers say of right ones."""

from __future__ import annotations

from pathlib import Path

import decode_mutants as mutants
import decode_sanitized
import pytest
from processes import NOTICED, TOOLS, Note, assert_nothing_found, outcomes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return outcomes(Path(mutants.__file__), mutants.MUTANTS)


@pytest.mark.xdist_group("attention_decode mutants")  # one process has what they share
@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_kernel_that_is_wrong_in_one_place_is_caught(
    name: str, found: dict[str, str], note: Note
) -> None:
    note(f"mutants.{name}", found[name])
    assert found[name] in NOTICED


@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_that_runs_finds_nothing(tool: str, note: Note) -> None:
    assert_nothing_found(tool, decode_sanitized.__file__, note)
