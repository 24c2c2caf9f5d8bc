"""What the tests of tuning share: sweeps, which cost time."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweeps import SHAPES, SPACE, write_sweep

from warploom.tuning.problems import Problem, problems


@pytest.fixture(scope="session")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("space") / "space.yaml"
    path.write_text(SPACE)
    return path


@pytest.fixture(scope="session")
def listed(space: Path) -> list[Problem]:
    return problems(space, SHAPES)


@pytest.fixture(scope="session")
def sweep(listed: list[Problem], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("sweep") / "sweep.jsonl", listed)
