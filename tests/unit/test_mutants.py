"""The faults that the gpu tests must notice can still be put into the kernels' text."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from types import ModuleType

import pytest

GPU_TESTS = Path(__file__).parents[1] / "gpu"


@pytest.fixture
def gpu_module(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """The module of tests/gpu that the test names."""
    monkeypatch.syspath_prepend(str(GPU_TESTS))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("gpu_module", ["mutant"], indirect=True)
def test_every_mutant_of_gemm_can_be_made(gpu_module: ModuleType) -> None:
    assert len(gpu_module.MUTANTS) >= 3
    for mutant in gpu_module.MUTANTS.values():
        assert mutant.source()  # LookupError where the text to take out is not there


@pytest.mark.parametrize(
    "gpu_module", ["attention_mutants", "attention_backward_mutants"], indirect=True
)
def test_every_mutant_of_attention_differs_by_its_fault_alone(gpu_module: ModuleType) -> None:
    assert len(gpu_module.MUTANTS) >= 6
    for name, mutant in gpu_module.MUTANTS.items():
        whole, wrong = (source.splitlines() for source in mutant.sources())
        changed = [x for x in difflib.ndiff(whole, wrong) if x[:2] in ("- ", "+ ")]
        assert 1 <= len(changed) <= 2, (name, changed)
        assert not any("clock64" in line for line in changed), name
