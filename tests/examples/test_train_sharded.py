"""examples/train_sharded.py, tiny, in one process: fp8 learns what bf16 does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import train_sharded


def test_fp8_learns_what_bf16_does_however_its_weights_are_gathered() -> None:
    """Gathers in fp8 by a wrong scale, or that reach no layer, part the losses."""
    done = CliRunner().invoke(train_sharded.main, ["--tiny", "--steps", "8", "--json"])
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["processes"] == 1 and result["seconds"].keys() == result["losses"].keys()
    bf16, fp8, gathered = (result["losses"][name] for name in ("bf16", *train_sharded.FP8))
    assert bf16[-1] < 0.97 * bf16[0]
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=0.02) and gathered == pytest.approx(fp8, rel=0.02)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's error of an invalid device ordinal says nothing of torchrun."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    done = CliRunner().invoke(train_sharded.main, ["--tiny"])
    assert done.exit_code == 2 and "torchrun --nproc-per-node 1" in done.output
