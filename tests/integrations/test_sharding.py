"""Operators take distributed tensors, in two processes: values, gradients, and what is sent."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
import shell
from forked import Program
from sharding_cases import CASES, PROCESSES


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process says of the cases that failed there."""
    folder = tmp_path_factory.mktemp("processes")
    ranks = (f"python -m sharding_cases {rank} '{folder}'" for rank in range(PROCESSES))
    done = shell.run(f"export GLOO_SOCKET_IFNAME=lo; {' & '.join(ranks)}; wait $!", folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", CASES)
def test_distributed_tensors(failed: list[dict[str, str]], name: str) -> None:
    for told in failed:
        assert name not in told, told[name]


def test_torch_distributed_is_loaded_for_distributed_tensors_only() -> None:
    """It takes most of a second, and few programs need it."""
    code = """
import sys, torch, warploom
warploom.gemm(torch.ones(2, 8).half(), torch.ones(8, 8).half())
torch.ops.warploom.gemm(torch.ones(2, 8).half(), torch.ones(8, 8).half(), [], [], [],
                        torch.float16, "fast", None)
assert "torch.distributed.tensor" not in sys.modules
"""
    (done,) = forked.run(Program(code))
    assert done.returncode == 0, done.stderr
