"""examples/train_gpt.py, tiny: it learns, can be stopped anywhere, and repeats itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import checkpoint
import gpt
import python_texts
import train_gpt
from trainer import Settings, Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ("--tiny", "--batch", "2", "--steps", "6", "--sample", "8")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(train_gpt.main, [str(one) for one in arguments])


def result(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def settings(**changes: Any) -> Settings:
    texts = python_texts.load(docstrings=False)
    given = {"implementation": "warploom", "seed": 0, "tiny": True, "steps": 6, "batch": 2}
    return train_gpt.chosen(texts, **(given | changes))


# ---- Learning ------------------------------------------------------------------------------------


def test_losses_fall_and_the_program_runs_from_any_folder(tmp_path: Path) -> None:
    """Gradients that are wrong, or reach no weight, leave the losses at log(256) = 5.55."""
    program = [sys.executable, str(EXAMPLES / "train_gpt.py"), "--tiny", "--json"]
    path = os.pathsep.join([str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        program,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["losses"][0] == pytest.approx(5.55, abs=0.15)
    assert found["losses"][-1] < 3.6 and found["validation loss"] < 3.6
    assert len(found["losses"]) == 40 and found["bytes per second"] > 0
    assert 0 < len(found["sample"]) <= 63  # of a context of 64, the first byte is given


def test_it_trains_in_fp8() -> None:
    """The blocks' layers by the recipe, and the head in bf16."""
    found = result("--tiny", "--steps", "30", "--recipe", "blockwise", "--sample", "0")
    assert found["recipe"] == "blockwise"
    assert found["losses"][-1] < 0.75 * found["losses"][0]
    done = run("--tiny", "--recipe", "rowwise", "--implementation", "torch")
    assert done.exit_code == 2 and "--recipe" in done.output


def test_it_trains_with_dropped_blocks_and_goes_on_with_the_same(tmp_path: Path) -> None:
    """A resumed run that drew masks of its own, or an option that reaches no layer, would show."""
    dropping = (*SHORT, "--dropout-blocks", "0.5")
    whole = result(*dropping)
    assert whole["dropout blocks"] == 0.5 and len(whole["losses"]) == 6
    plain = result(*SHORT)
    assert whole["losses"] != plain["losses"]
    assert whole["losses"][-1] < whole["losses"][0]
    parts = (*dropping, "--checkpoint", tmp_path / "parts.npz")
    result(*parts, "--stop-at", 3)
    assert result(*parts, "--resume")["losses"] == whole["losses"]
    for refused in (("--implementation", "torch"), ("--recipe", "rowwise")):
        done = run(*dropping, *refused)
        assert done.exit_code == 2 and "--dropout-blocks" in done.output


def test_the_implementations_are_the_same_model(tmp_path: Path) -> None:
    """Names of weights, their values and the losses: what differs is rounding of bf16."""
    ours, peers = (
        result(*SHORT, "--implementation", name, "--checkpoint", tmp_path / name)
        for name in ("warploom", "torch")
    )
    assert ours["losses"] == pytest.approx(peers["losses"], abs=0.02)
    tensors, others = (checkpoint.read(tmp_path / name)[0] for name in ("warploom", "torch"))
    assert tensors.keys() == others.keys() and len(tensors) > 90
    for name, tensor in tensors.items():
        assert tensor.shape == others[name].shape, name


def test_the_first_gradients_are_those_of_float32() -> None:
    """A branch without a gradient, or one that is not causal, trains all the same, only worse."""
    size = gpt.Size(layers=2, width=64, heads=2, context=64)
    text = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(1))

    def gradients(model: gpt.Gpt) -> dict[str, torch.Tensor]:
        loss = gpt.next_byte_loss(model(text[:, :-1]), text[:, 1:])
        torch.autograd.backward(loss)
        return {
            name: one.grad.float() for name, one in model.named_parameters() if one.grad is not None
        }

    exact = gradients(gpt.Gpt(size, "torch", seed=0))
    found = gradients(gpt.Gpt(size, "warploom", seed=0).bfloat16())
    assert found.keys() == exact.keys() and len(found) == 30
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-6, name


def test_updates_too_small_for_bf16_are_kept() -> None:
    """With bf16 weights alone, an update below 1/256 of a weight is rounded away."""
    texts = python_texts.load(docstrings=False)
    trainer = Trainer(settings(), texts, torch.device("cpu"))
    before = {name: weight.clone() for name, weight in trainer.masters.items()}
    trainer.advance()
    name = "blocks.0.mlp_norm.weight"  # ones, changed by a rate of 3e-3 at most
    assert not torch.equal(trainer.masters[name], before[name])
    assert not torch.equal(trainer.masters[name], trainer.masters[name].bfloat16().float())
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, trainer.masters[name].bfloat16()), name


# ---- Stopping ------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_ends_in_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole = result(*SHORT, "--checkpoint", tmp_path / "whole.npz")
    parts = (*SHORT, "--checkpoint", tmp_path / "parts.npz")
    stopped = result(*parts, "--stop-at", 3)
    assert stopped["steps"] == 3
    resumed = result(*parts, "--resume")
    assert resumed["losses"] == whole["losses"] and resumed["losses"][:3] == stopped["losses"]
    assert resumed["sample"] == whole["sample"]
    assert resumed["validation loss"] == whole["validation loss"]
    tensors, others = (checkpoint.read(tmp_path / f"{name}.npz")[0] for name in ("whole", "parts"))
    assert tensors.keys() == others.keys()
    assert [name for name, one in tensors.items() if not torch.equal(one, others[name])] == []


def test_a_run_that_is_over_is_not_begun_again(tmp_path: Path) -> None:
    arguments = (*SHORT, "--checkpoint", tmp_path / "gpt.npz")
    first = result(*arguments)
    again = result(*arguments, "--resume")
    assert again["losses"] == first["losses"] and again["bytes per second"] is None


def test_a_write_that_fails_leaves_the_checkpoint_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A full disk in the middle of a write took the only checkpoint with it."""
    path = tmp_path / "gpt.npz"
    checkpoint.write(path, {"x": torch.ones(3)}, {"seed": 0})

    def full(file: BinaryIO, **arrays: object) -> None:
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.write(path, {"x": torch.zeros(3)}, {"seed": 1})
    tensors, about = checkpoint.read(path)
    assert tensors["x"].tolist() == [1, 1, 1] and about == {"seed": 0}
    assert [one.name for one in tmp_path.iterdir()] == ["gpt.npz"]


@pytest.mark.parametrize(
    ("changed", "named"), [(("--seed", 1), "seed 0"), (("--steps", 7), "steps 6")]
)
def test_a_run_of_other_settings_is_not_gone_on_with(
    changed: tuple[str, int], named: str, tmp_path: Path
) -> None:
    arguments = (*SHORT, "--checkpoint", tmp_path / "gpt.npz")
    result(*arguments, "--stop-at", 1)
    refused = run(*arguments, *changed, "--resume")
    assert refused.exit_code == 1 and named in refused.stderr


@pytest.mark.parametrize("content", [None, b"", b"PK", b"\x93NUMPY"])
def test_what_is_no_checkpoint_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "gpt.npz"
    if content is not None:
        path.write_bytes(content)
    refused = run(*SHORT, "--checkpoint", path, "--resume")
    assert refused.exit_code == 1 and "must be a checkpoint" in refused.stderr


def test_resume_without_a_checkpoint_says_which_option_is_missing() -> None:
    refused = run(*SHORT, "--resume")
    assert refused.exit_code == 2 and "--checkpoint" in refused.stderr


# ---- Texts and pictures --------------------------------------------------------------------------


def test_texts_are_the_same_each_time_and_parts_do_not_overlap() -> None:
    texts, again = (python_texts.load(docstrings=False) for _ in range(2))
    assert texts.digest == again.digest and torch.equal(texts.training, again.training)
    blocks = {
        bytes(part[start : start + python_texts.BLOCK].tolist())
        for part in (texts.training, texts.validation)
        for start in range(0, part.numel(), python_texts.BLOCK)
    }
    total = texts.training.numel() + texts.validation.numel()
    assert len(blocks) == -(-total // python_texts.BLOCK)  # each in one part, and once
    assert 0.08 < texts.validation.numel() / total < 0.12


def test_a_python_without_its_topics_has_texts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some distributions leave them out: docstrings are there, the outer ones first."""
    (tmp_path / "b.py").write_text('"""Module b."""\ndef f(): "Function f."\n')
    (tmp_path / "a.py").write_text('class A:\n    "Class A."\n')
    monkeypatch.setattr(python_texts, "LIBRARY", tmp_path)
    assert python_texts.load(docstrings=False).training.numel() > 100_000
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    found = bytes(python_texts.load(docstrings=False).training.tolist())
    assert found == b"Class A.\n\nModule b.\n\nFunction f."


def test_losses_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result(*SHORT, "--picture", tmp_path / "losses.svg")
    drawn = (tmp_path / "losses.svg").read_text()
    assert "</svg>" in drawn and drawn.count("<path") > 6


def test_a_picture_without_matplotlib_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(Trainer, "advance", lambda _: pytest.fail("it was trained"))
    refused = run(*SHORT, "--picture", tmp_path / "losses.svg")
    assert refused.exit_code == 1 and "warploom[plot]" in refused.stderr
