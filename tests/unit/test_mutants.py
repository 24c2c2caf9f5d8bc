"""The faults that the gpu tests must notice can still be put into the kernels' text."""

from __future__ import annotations

import difflib
import re
from importlib import import_module
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Every module beside gpu tests that declares mutants: one that nobody lists here counts, too.
MODULES = {
    path.stem: path
    for path in sorted(TESTS.glob("families/*/gpu/*.py"))
    if re.search(r"^MUTANTS\b.*=", path.read_text(), re.M)
}


def test_every_family_with_gpu_tests_of_mutants_has_some() -> None:
    """What a test of mutants runs lies beside it, where it is found."""
    tested = {path.parent for path in TESTS.glob("families/*/gpu/test_mutants.py")}
    assert tested == {path.parent for path in MODULES.values()}


@pytest.mark.parametrize("name", MODULES)
def test_every_mutant_differs_by_its_fault_alone(name: str) -> None:
    """LookupError where the text to take out is not there: the gpu test would fail for that."""
    mutants = import_module(name).MUTANTS
    assert len(mutants) >= 5
    for fault, mutant in mutants.items():
        whole, wrong = (source.splitlines() for source in mutant.sources())
        changed = [x for x in difflib.ndiff(whole, wrong) if x[:2] in ("- ", "+ ")]
        assert changed, fault
        # A pattern takes out all that it matches, a text what stands there once.
        assert len(changed) <= 4 or hasattr(mutant, "without"), (fault, changed)
        assert not any("clock64" in line for line in changed), fault
