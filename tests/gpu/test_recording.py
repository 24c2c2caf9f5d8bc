"""Calls that a program makes on a GPU are recorded; what is compiled of them is all it needs."""

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
from warploom.tuning import calls

pytestmark = pytest.mark.gpu
MODEL = """
import torch, warploom
torch.manual_seed(0)
layer = warploom.nn.Linear(512, 384, device="cuda", dtype=torch.bfloat16, activation="gelu_tanh")
x = torch.randn(77, 512, device="cuda").bfloat16().requires_grad_()
q, k = (torch.randn(1, h, 300, 128, device="cuda").bfloat16().requires_grad_() for h in (8, 2))
a, b = (torch.randn(*one, device="cuda").bfloat16() for one in ((100, 264), (264, 96)))
out = torch.empty(100, 96, device="cuda", dtype=torch.bfloat16)
own = warploom.plan(a, b, out=out)
compiled = torch.compile(lambda x: warploom.gemm(x, b) * 2, backend='aot_eager')

def model():
    layer(x).sum().backward()
    warploom.attention(q, k, k, causal=True).sum().backward()
    own(a, b, out)
    compiled(a)
    torch.cuda.synchronize()
"""


def run_model(code: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MODEL + code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_warm_model_is_recorded_as_a_cold_one_and_what_it_needs_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold, warm = tmp_path / "cold.json", tmp_path / "warm.json"
    run_model(
        f"""
with warploom.recording({str(cold)!r}):
    model()
model()
with warploom.recording({str(warm)!r}):
    model()
"""
    )
    assert set(calls.read(warm)) == set(calls.read(cold))
    families = {one.operation.family for one in calls.read(warm)}
    assert {"gemm", "attention_forward", "attention_backward"} <= families
    store = str(tmp_path / "store")
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", store)
    result = CliRunner().invoke(main, ["compile", str(warm), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["GPU"] == torch.cuda.get_device_name()
    forbidden = {"WARPLOOM_CACHE_DIR": store, "WARPLOOM_COMPILE": "forbid"}
    run_model("model()\nassert warploom.counters.compiles == 0", **forbidden)


def test_calls_that_a_graph_captures_are_recorded_and_run_as_without(tmp_path: Path) -> None:
    a = torch.randn(77, 512, device="cuda").bfloat16()
    b = torch.randn(512, 384, device="cuda").bfloat16()
    expected = warploom.gemm(a, b)
    graph = torch.cuda.CUDAGraph()
    with warploom.recording(tmp_path / "calls.json") as found, torch.cuda.graph(graph):
        captured = warploom.gemm(a, b)
    graph.replay()
    assert torch.equal(captured, expected)
    assert [str(one.shape) for one in found.calls] == ["77x384x512"]


def test_a_plan_whose_launch_is_only_fired_again_is_recorded(tmp_path: Path) -> None:
    a = torch.randn(77, 512, device="cuda").bfloat16()
    b = torch.randn(512, 384, device="cuda").bfloat16()
    out = torch.empty(77, 384, device="cuda", dtype=torch.bfloat16)
    plan = warploom.plan(a, b, out=out)
    for _ in range(3):
        plan(a, b, out)
    with warploom.recording(tmp_path / "calls.json") as found:
        plan(a, b, out)
    assert [str(one.shape) for one in found.calls] == ["77x384x512"]
