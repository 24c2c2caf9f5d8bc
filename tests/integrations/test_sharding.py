"""Operators take distributed tensors, in two processes: values, gradients, and what is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharding_cases
from sharding_cases import CASES, PROCESSES


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process says of the cases that failed there."""
    folder = tmp_path_factory.mktemp("processes")
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    processes = [
        subprocess.Popen(
            [sys.executable, sharding_cases.__file__, str(rank), str(folder)], env=environment
        )
        for rank in range(PROCESSES)
    ]
    try:
        for process in processes:
            assert process.wait(timeout=240) == 0
    finally:
        for process in processes:
            process.kill()
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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
