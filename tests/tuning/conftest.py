"""What the tests of tuning share: sweeps, which cost time, and where calls are tuned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
from autotuned import Machine
from sweeps import GPU, SHAPES, SPACE, write_sweep

from warploom import hooks
from warploom.generator import records_file
from warploom.generator.gpus import file_name
from warploom.runtime import records
from warploom.tuning import gpu
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The records of one test, which are all that there are."""
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path))
    monkeypatch.setattr(records_file, "shipped", lambda gpu: None)
    records.forget()
    yield tmp_path
    hooks.observer = None
    records.forget()


@pytest.fixture
def machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Where calls are tuned, with records of this test's own."""
    made = Machine(monkeypatch)
    yield made
    made.end()


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measuring process that says "silence" has said nothing for as long as it may.

    However short that is, a busy machine has the time that it needs for whatever is said.
    """

    class Lines(Queue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> object:
            assert block and timeout
            line = super().get(timeout=600)
            if line == "silence\n":
                raise Empty
            return line

    monkeypatch.setattr(gpu, "Queue", Lines)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of records of this test's own, without what came with the package."""
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path))
    monkeypatch.setattr(records_file, "shipped", lambda gpu: None)
    records.forget()
    yield tmp_path / file_name(GPU)
    records.forget()
