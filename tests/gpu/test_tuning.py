"""Tuning on the GPU: kernels that hang, fault or compute nothing, and a run from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gemm_cases as cases
import pytest
import torch

from warploom.errors import WarploomError
from warploom.generator.build import build_many
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.families.gemm import GemmShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import kernel as kernels
from warploom.tuning.gpu import Batch, GpuProcess, visible

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent

SPECS = tuple(
    cases.spec(tile, kernel_schedule=roles)
    for tile in ((128, 128), (128, 192), (64, 64))
    for roles in ("cooperative", "pingpong")
    if tile != (64, 64) or roles == "pingpong"
)
BATCH = Batch(SPECS[0].operation, GemmShape(257, 264, 520), SPECS, 0.01, 4)
ATTENTION = KernelSpec(
    "sm_90a",
    AttentionOperation("bf16", 64, "causal"),
    AttentionSchedule(128, 128, scheduler="dynamic"),
)
GRADIENTS = tuple(
    KernelSpec(
        "sm_90a",
        AttentionBackwardOperation("bf16", 64, "causal"),
        AttentionBackwardSchedule(q_tile, 128, accumulate=way),  # type: ignore[arg-type]
    )
    for q_tile, way in ((64, "bulk"), (96, "direct"))
)


@pytest.fixture(scope="module")
def compiled(private_store: Path) -> None:
    """Compile the kernels, as the tuner does before it has them measured."""
    for result in build_many((*SPECS, ATTENTION, *GRADIENTS), kernels.store()):
        if isinstance(result, WarploomError):
            raise result


@pytest.mark.usefixtures("compiled")
def test_a_batch_is_verified_and_timed_in_a_process_of_its_own() -> None:
    gpu = GpuProcess(visible(1)[0])
    properties = torch.cuda.get_device_properties(0)
    assert (gpu.about.gpu, gpu.about.multiprocessors) == (
        *(properties.name, properties.multi_processor_count),
    )
    found = gpu.measure(BATCH)
    assert {result.outcome for result in found.values()} == {"correct"}, found
    assert found[SPECS[0]].relative == 1.0
    assert all(1e-6 < (result.seconds or 0) < 1e-3 for result in found.values())
    shape = AttentionShape(2, 8, 2, 1021, 1021, 64)
    (result,) = gpu.measure(Batch(ATTENTION.operation, shape, (ATTENTION,), 0.01, 4)).values()
    assert result.outcome == "correct" and result.seconds, result
    found = gpu.measure(Batch(GRADIENTS[0].operation, shape, GRADIENTS, 0.01, 4))
    assert [found[spec].outcome for spec in GRADIENTS] == ["correct"] * 2, found
    assert all(1e-5 < (one.seconds or 0) < 1e-3 for one in found.values())
    gpu.close()


@pytest.mark.usefixtures("compiled")
def test_kernels_that_hang_fault_or_compute_nothing_are_told_apart() -> None:
    faults = {SPECS[0].name: "nothing", SPECS[1].name: "fault", SPECS[3].name: "hang"}
    command = [sys.executable, "-P", str(HERE / "faulty_worker.py"), json.dumps(faults)]
    gpu = GpuProcess(visible(1)[0], command, trying=20.0)
    found = gpu.measure(BATCH)
    outcomes = [found[spec].outcome for spec in SPECS]
    assert outcomes == ["wrong", "illegal", "correct", "timeout", "correct"], found
    assert found[SPECS[2]].relative == 1.0  # the first that is right takes the first's place
    gpu.close()


SPACE = """\
version: 1
arch: sm_90a
kernels:
  - operations: [{family: gemm, a: bf16, b: bf16, d: bf16}]
    schedules:
      - {tile: [[64, 64, 64], [64, 128, 64], [128, 128, 64], [128, 192, 64]],
         kernel_schedule: pingpong}
"""
EXPLAIN = """
import torch, warploom
a = torch.randn(384, 1024, device="cuda").bfloat16()
b = torch.randn(1536, 1024, device="cuda").bfloat16().t()
print(warploom.explain(a, b))
d = warploom.gemm(a, b).double()
assert (d - a.double() @ b.double()).abs().max() < 0.5
"""


def test_what_was_tuned_is_what_the_next_process_runs(tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(SPACE)
    path = os.pathsep.join(sys.path)
    settings = {"WARPLOOM_RECORDS": "use", "WARPLOOM_RECORDS_DIR": str(tmp_path)}
    environment = os.environ | settings | {"PYTHONPATH": path}
    flags = ("--shapes", "384x1536x1024", "--budget", "60")
    tune = [sys.executable, "-P", "-m", "warploom", "tune", str(space), *flags]
    done = subprocess.run(tune, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.json")
    (record,) = json.loads(file.read_text())["records"]
    explain = [sys.executable, "-P", "-c", EXPLAIN]
    told = subprocess.run(explain, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "recorded" in told.stdout and "at this shape" in told.stdout, told.stdout
    tile = "x".join(map(str, record["best"]["schedule"]["tile"]))
    assert f"_{tile}_" in told.stdout.splitlines()[0]
