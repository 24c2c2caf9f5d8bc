"""The examples in their whole sizes, few steps of each, as programs on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]


def run(name: str, *arguments: object) -> dict[str, Any]:
    """What an example reports."""
    program = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--json"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def train(*arguments: object) -> dict[str, Any]:
    return run("train_gpt", "--steps", 12, "--sample", 4, *arguments)


def test_a_gpt_learns_as_on_torch() -> None:
    """Gradients that miss a term let losses fall more slowly than another rounding does."""
    ours, peer = train(), train("--implementation", "torch")
    assert ours["losses"] == pytest.approx(peer["losses"], abs=0.03)
    assert ours["losses"] != peer["losses"]  # other kernels ran
    assert ours["losses"][-1] < ours["losses"][0] - 1.5


def test_a_run_that_was_stopped_ends_in_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole = train()
    parts = ("--checkpoint", tmp_path / "gpt.npz")
    train(*parts, "--stop-at", 5)
    resumed = train(*parts, "--resume")
    for name in ("losses", "validation loss", "sample"):
        assert resumed[name] == whole[name], name


def test_a_compiled_gpt_has_the_losses_of_one_that_is_not() -> None:
    assert train("--compile")["losses"] == pytest.approx(train()["losses"], abs=0.03)


def test_a_patched_llama_has_the_loss_and_the_gradients_of_torch() -> None:
    found = run("llama_step", "--no-compile", "--rounds", 2)
    assert found["wrong"] == {} and found["ratios"]["warploom"] > 0


def test_a_compiled_patched_llama_has_them_too() -> None:
    found = run("llama_step", "--tiny", "--tokens", 128, "--compile", "--rounds", 1)
    assert found["errors"].keys() >= {"warploom", "warploom, compiled"}


@pytest.mark.parametrize("compiled", ["--compile", "--no-compile"])
def test_a_patched_llama_generates_the_tokens_of_torch(compiled: str) -> None:
    found = run("generate", compiled, "--new-tokens", 16, "--batch", 2, "--rounds", 1)
    assert found["tokens"] == {"torch": 32, "warploom": 32}
    assert all(one["by rounding"] for one in found["partings"])
