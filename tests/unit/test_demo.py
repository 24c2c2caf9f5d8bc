"""The demo without its size: what it shows, and how it ends when something is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import warploom
from warploom import demo
from warploom.errors import CompilationError
from warploom.generator import build
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.specification import KernelSpec

LAYER = dict(demo.LAYER)
Done = Callable[[KernelSpec, build.Result], None]


def artifact(spec: KernelSpec) -> Artifact:
    resources = {spec.name: Resources(registers=168, spill_bytes=0, local_bytes=0)}
    return Artifact(spec.name, spec.arch, b"cubin", "", "", (), resources, (), 1.25)


def build_many(specs: Sequence[KernelSpec], on_done: Done) -> list[build.Result]:
    """All kernels are compiled, in no time."""
    results: list[build.Result] = []
    for spec in specs:
        results.append(artifact(spec))
        on_done(spec, results[-1])
    return results


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_many", build_many)
    monkeypatch.setattr(demo, "LAYER", {"q": (96, 80), "down": (80, 96)})
    monkeypatch.setattr(demo, "TOKENS", {"cpu": 7})
    monkeypatch.setattr(demo, "HEADS", 4)
    monkeypatch.setattr(demo, "KV_HEADS", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(demo.command, arguments)


def test_the_layer_is_that_of_llama_3_8b() -> None:
    # Its 32 layers hold 6.98e9 of the model's 8.03e9 parameters; embedding and head hold the rest.
    weights = 32 * sum(n * k for n, k in LAYER.values())
    assert len(LAYER) == 7
    assert weights + 2 * 128256 * LAYER["q"][1] == pytest.approx(8.03e9, rel=1e-3)


def test_every_part_is_shown_with_its_kernel_and_its_error() -> None:
    result = run("--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    rows = {row["part"]: row for row in shown["layer"]}
    assert [*rows] == [
        *("q", "down", "attention", "attention, causal", "backward", "backward, causal"),
    ]
    assert [rows[name]["shape"] for name in ("q", "attention")] == ["7x96x80", "4/2 heads, 56"]
    assert all(0 < row["error / bound"] <= 1 for row in rows.values())
    assert shown["largest error / bound"] == max(row["error / bound"] for row in rows.values())
    assert {row["registers"] for row in rows.values()} == {168}
    assert all(shown["kernels"][name].endswith(row["kernel"]) for name, row in rows.items())
    families = [name.partition("_sm90a_")[0] for name in shown["kernels"].values()]
    attention = ["attention_forward"] * 2 + ["attention_backward"] * 2
    assert families == ["gemm", "gemm", *attention]


def test_all_of_it_is_one_screen() -> None:
    """It was a wall of 130 kernels, and the first thing of use came after two minutes."""
    lines = run().stdout.splitlines()
    assert 7 - len(demo.LAYER) + len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert "Checked: 6 results, every element against float64" in "\n".join(lines)
    assert any(line.strip().startswith("warploom report ") for line in lines)


def test_the_kernels_on_an_h200_are_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The column was the choice of the table, which an H200 does not make."""
    monkeypatch.setattr(demo, "LAYER", {"q": (2112, 7168)})
    explain, asked = warploom.explain, list[object]()

    def asking(*operands: torch.Tensor, gpu: str, **keywords: bool) -> object:
        asked.append(gpu)
        return explain(*operands, gpu=gpu, **keywords)  # type: ignore[call-overload]

    monkeypatch.setattr(warploom, "explain", asking)
    shown = json.loads(run("--json").stdout)
    assert asked == ["NVIDIA H200"] * 5  # a product, two attentions and their gradients
    a, b = torch.empty(7, 7168).bfloat16(), torch.empty(2112, 7168).bfloat16().t()
    there = explain(a, b, gpu="NVIDIA H200").kernel
    assert shown["kernels"]["q"] == there != explain(a, b).kernel


def test_plain_text_without_a_terminal_says_that_there_is_no_gpu() -> None:
    result = run()
    assert "no GPU here" in result.stdout
    assert "7 tokens (attention: 56), bf16" in result.stdout
    assert "\x1b" not in result.output


def test_a_wrong_result_ends_in_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    right = warploom.gemm

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        d = right(a, b)
        d[0, 0] += 1
        return d

    monkeypatch.setattr(warploom, "gemm", wrong)
    result = run()
    assert result.exit_code == 3
    assert "q, down" in result.stderr


def test_a_wrong_attention_ends_in_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    right = warploom.attention

    def wrong(*arguments: torch.Tensor, causal: bool, return_lse: bool) -> object:
        out, lse = right(*arguments, causal=causal, return_lse=True)
        lse = lse.clone()
        if causal:
            lse[0, 0, 0] += 0.1
        return out, lse

    monkeypatch.setattr(warploom, "attention", wrong)
    result = run()
    assert result.exit_code == 3
    assert "attention, causal" in result.stderr


def test_a_wrong_gradient_ends_in_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    right = warploom.attention

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: bool) -> object:
        return right(q, k * 1, v.detach() + 0 * v, **keywords)  # type: ignore[call-overload]

    monkeypatch.setattr(warploom, "attention", wrong)
    result = run()
    assert result.exit_code == 3
    assert "backward, backward, causal" in result.stderr


def test_a_timed_backward_pass_has_leaves_of_its_own() -> None:
    """Autograd brings gradients to the stream that first used a leaf, which ended a capture."""
    used: list[torch.Tensor] = []

    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        used.extend((q, k))
        return q * k

    operands = [torch.ones(2, requires_grad=True) for _ in range(2)]
    held = operands[0] * operands[1]  # a forward pass that is still alive, of another stream
    call = demo._backward(attend, operands, torch.full((2,), 3.0))
    for _ in range(2):
        assert [gradient.tolist() for gradient in call()] == [[3.0, 3.0]] * 2  # type: ignore[attr-defined]
    assert len(used) == 2  # the forward pass ran once
    assert not {id(leaf) for leaf in used} & {id(operand) for operand in operands}
    assert held.requires_grad


def test_a_kernel_that_does_not_compile_ends_in_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(specs: Sequence[KernelSpec], on_done: Done) -> list[build.Result]:
        log = "x.cu(1): error: no"
        return [CompilationError(spec.name, log=log, source="") for spec in specs]

    monkeypatch.setattr(build, "build_many", failing)
    result = run()
    assert result.exit_code == 2
    assert "error: no" in result.stderr


def test_commands_that_are_not_found_are_told_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`warploom report` was not found by who had run `make demo`, which activates nothing."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(demo, "which", lambda _: None)
    assert "bin/activate`:" in run().stdout
    monkeypatch.setattr(demo, "which", lambda name: f"/usr/bin/{name}")
    assert "Next:" in run().stdout
