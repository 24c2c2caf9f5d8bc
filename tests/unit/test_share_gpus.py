"""Processes of the gpu tests begin with different GPUs, and lose sight of none."""

from __future__ import annotations

import os

import pytest
import share_gpus


@pytest.mark.parametrize(
    ("number", "given", "seen"),
    [(0, "0,1", "0,1"), (1, "0,1", "1,0"), (5, "0,1,2", "2,0,1"), (3, "7", "7"), (1, "", "")],
)
def test_every_process_begins_with_another_gpu(
    number: int, given: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    share_gpus.begin_with(number)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_a_machine_without_a_driver_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "")
    share_gpus.begin_with(1)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
