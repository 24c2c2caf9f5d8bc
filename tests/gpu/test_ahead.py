"""Kernels that are compiled ahead of time for this GPU are those that its calls run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import warploom
from warploom.cli import main

pytestmark = pytest.mark.gpu
SHAPES = ((1, 6144, 4096), (77, 1000, 520), (512, 6144, 4096), (3000, 256, 4096), (129, 1027, 96))
HEADS, SEQ = (8, 2), 1000
CALLS = f"""
import torch, warploom
for m, n, k in {SHAPES}:
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16().t()
    assert (warploom.gemm(a, b).float() - (a.float() @ b.float())).abs().max() < 4
q, k = (torch.randn(1, h, {SEQ}, 128, device="cuda").bfloat16().requires_grad_() for h in {HEADS})
warploom.attention(q, k, k, causal=True).float().sum().backward()
torch.cuda.synchronize()
assert warploom.counters.compiles == 0, warploom.counters
"""


def this_gpu() -> str:
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}:{properties.multi_processor_count}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_told_of_a_named_gpu_is_what_a_call_on_it_runs(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = (torch.empty(*extents, device="meta").bfloat16() for extents in ((m, k), (n, k)))
    told = warploom.explain(a, b.t(), gpu=this_gpu())
    run = warploom.explain(
        torch.empty_like(a, device="cuda"), torch.empty_like(b, device="cuda").t()
    )
    assert (told.kernel, told.grid, told.copies) == (run.kernel, run.grid, run.copies)


def test_what_is_told_of_a_named_gpu_is_what_an_attention_on_it_runs() -> None:
    def explained(device: str, gpu: str | None) -> tuple[str, int, str | None]:
        q, k = (torch.empty(1, h, SEQ, 128, device=device).bfloat16() for h in HEADS)
        found = warploom.explain(q, k, k, causal=True, gpu=gpu)
        return found.kernel, found.grid, found.backward

    assert explained("meta", this_gpu()) == explained("cuda", None)


def test_calls_find_what_was_compiled_for_their_shapes_where_nothing_may_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    causal = tmp_path / "causal.yaml"
    causal.write_text(
        "version: 1\narch: sm_90a\nkernels:\n"
        "  - operations: [{family: attention_forward, element: bf16, dim: 128, mask: causal}]\n"
        "    schedules: [{q_tile: 128, kv_tile: 128}]\n"
        "  - operations: [{family: attention_backward, element: bf16, dim: 128, mask: causal}]\n"
        "    schedules: [{q_tile: 64, kv_tile: 128}]\n"
    )
    products = ",".join("x".join(map(str, shape)) for shape in SHAPES)
    for arguments in (
        ["gemm", "--shapes", products],
        [str(causal), "--shapes", f"1x{HEADS[0]}x{HEADS[1]}x{SEQ}"],
    ):
        result = CliRunner().invoke(main, ["compile", *arguments, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["GPU"] == torch.cuda.get_device_name()
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        env=os.environ | {"WARPLOOM_COMPILE": "forbid", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
