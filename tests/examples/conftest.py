"""Tests import the examples as they import each other: by name, from their folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))


@pytest.fixture(autouse=True)
def on_one_core_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is so small gains nothing by a second thread, which waits for a core of others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of programs that a test starts
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
