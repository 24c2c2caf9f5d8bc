"""Kernels that are wrong in one place."""

from __future__ import annotations

import mutants
import pytest
from fp32_pieces_mutants import MUTANTS
from processes import Note

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_that_is_wrong_in_one_place_is_caught(name: str, note: Note) -> None:
    found = mutants.outcome(MUTANTS[name])
    note(f"mutants.{name}", found)
    assert found == "caught"
