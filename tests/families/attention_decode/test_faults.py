"""The faults that gpu tests put into kernels are in the text of their kernels."""

from __future__ import annotations

import decode_mutants as mutants
import pytest


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_fault_is_in_the_text_of_its_kernel(name: str) -> None:
    whole, wrong = mutants.MUTANTS[name].sources()
    assert whole != wrong
