"""`warploom doctor` on a machine with a GPU: all is well, and the GPU is told as torch has it."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from warploom.cli import main

pytestmark = pytest.mark.gpu


def test_doctor_tells_driver_and_gpu_and_finds_nothing_amiss() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    report = json.loads(result.stdout)
    found = {row["check"]: row for row in report["checks"]}
    for name in ("NVRTC", "compiling", "driver", "GPU 0", "torch"):
        assert found[name]["good"], report["advice"]
    about = torch.cuda.get_device_properties(0)
    told = found["GPU 0"]["found"]
    assert told.startswith(f"{about.name}, compute capability 9.0, sm_90a, "), told
    assert f" {about.multi_processor_count} multiprocessors, " in told and told.endswith(" GiB")
    assert told.isprintable()
    assert "CUDA 13" in found["driver"]["found"] and "libcuda.so" in found["driver"]["where"]
