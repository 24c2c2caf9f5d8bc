"""The table of faults fits the tree: each can still be put into it, in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from seeded_faults import ROOT, Fault, faults, outcome

FAULTS = faults()


def test_there_are_forty_faults_each_told_once() -> None:
    assert len({fault.fault for fault in FAULTS}) == len(FAULTS) >= 40
    assert len({(fault.file, fault.replace) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.fault)
def test_a_fault_can_be_put_into_one_place_and_its_tests_are_there(fault: Fault) -> None:
    """Else the run that tries them all, which takes minutes and is rare, would end on it."""
    wrong = fault.text(ROOT)
    assert wrong != (ROOT / fault.file).read_text()
    ast.parse(wrong)
    assert fault.caught_by
    assert [test for test in fault.caught_by if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("assert double(2) == 4", "caught"),
        ("assert double(0) == 0", "missed"),
    ],
)
def test_a_fault_is_caught_by_what_fails_with_it_alone(
    test: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")  # takes a second to load
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "doubling.py").write_text("def double(x):\n    return 2 * x\n")
    body = f"from doubling import double\n\ndef test_it():\n    {test}\n"
    (tmp_path / "test_it.py").write_text(body)
    fault = Fault("tripled", "src/doubling.py", "2 * x", "3 * x", ("test_it.py",))
    assert outcome(tmp_path, fault) == told
    assert "2 * x" in (tmp_path / "src" / "doubling.py").read_text()
    with pytest.raises(LookupError, match="once"):
        Fault("gone", "src/doubling.py", "4 * x", "x", ()).text(tmp_path)
