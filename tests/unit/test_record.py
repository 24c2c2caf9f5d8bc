"""The kernels in the tree are those that last passed the tests on a GPU."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

GPU_TESTS = Path(__file__).parents[1] / "gpu"
RECORD = GPU_TESTS / "record.json"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    if not RECORD.is_file():
        pytest.skip("tests/gpu/record.json does not exist yet: run `make gpu-test` on a GPU")
    content: dict[str, Any] = json.loads(RECORD.read_text())
    return content


def test_no_kernel_was_changed_after_it_last_passed_on_a_gpu(recorded: dict[str, Any]) -> None:
    digest = runpy.run_path(str(GPU_TESTS / "record.py"))["digest"]()
    assert recorded["digest"] == digest, (
        "templates, generator or runtime changed since the tests last passed on a GPU: "
        "run `make gpu-test` on a GPU and commit tests/gpu/record.json"
    )


def test_every_file_of_tests_passed_on_a_gpu(recorded: dict[str, Any]) -> None:
    assert set(recorded["tests"]) == {path.name for path in GPU_TESTS.glob("test_*.py")}
    assert sum(file["passed"] for file in recorded["tests"].values()) > 500
    assert set(recorded["sanitizers"]) == {"memcheck", "racecheck", "synccheck", "initcheck"}
    assert [name for name, outcome in recorded["mutants"].items() if outcome == "survived"] == []
    assert len(recorded["mutants"]) >= 3
