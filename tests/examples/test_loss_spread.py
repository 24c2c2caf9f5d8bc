"""examples/loss_spread.py: what counts as within the spread of seeds, and how the program ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import fp32_steps
import loss_spread
import python_texts
import warploom.fp32
from train_gpt import TINY
from trainer import Settings, Trainer
from warploom.errors import ProblemError
from warploom.integrations import devices
from warploom.integrations import fp32 as activated


class StandIn:
    """A trainer whose losses are of its seed, and those of Warploom's kernels off by `error`."""

    error = 0.0

    def __init__(self, settings: Settings, _texts: object, _device: object) -> None:
        self.settings = settings
        self.losses: list[float] = []
        self.masters = {"positions": torch.zeros(1)}
        self.level = settings.seed + (self.error if settings.implementation == "warploom" else 0)

    @property
    def step(self) -> int:
        return len(self.losses)

    def advance(self) -> None:
        self.losses.append(10 + self.level)

    def validate(self) -> float:
        return 20 + self.level


def run(
    monkeypatch: pytest.MonkeyPatch,
    error: float,
    *arguments: str,
    trainer: type[StandIn] = StandIn,
) -> Result:
    monkeypatch.setattr(StandIn, "error", error)
    monkeypatch.setattr(loss_spread, "Trainer", trainer)
    return CliRunner().invoke(loss_spread.main, ["--tiny", "--steps", "40", *arguments])


def test_the_margin_is_the_distance_of_the_outermost_from_the_next() -> None:
    found = loss_spread.verdict("step 20", [3.0, 1.0, 1.5, 2.8], [2.0])
    assert (found.least, found.greatest, found.margin) == (1.0, 3.0, 0.5)
    assert found.between and found.within


@pytest.mark.parametrize(
    ("loss", "between", "within"),
    [(0.9, False, True), (0.4, False, False), (3.4, False, True), (3.6, False, False)],
)
def test_one_seed_outside_decides(loss: float, between: bool, within: bool) -> None:
    found = loss_spread.verdict("step 20", [3.0, 1.0, 1.5, 2.8], [2.0, loss])
    assert (found.between, found.within) == (between, within)


def test_every_seed_of_torch_is_within_the_range_of_the_others() -> None:
    """What the margin is for: torch's own kernels must pass as a contender."""
    losses = [1.0, 1.7, 1.9, 2.0, 3.5]
    margin = loss_spread.verdict("", losses, []).margin
    for index, loss in enumerate(losses):
        others = losses[:index] + losses[index + 1 :]
        assert min(others) - margin <= loss <= max(others) + margin


def test_losses_within_the_spread_end_in_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, 0.9, "--seeds", "3", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["within"] is True and found["between"] == 0
    whats = [one["what"] for one in found["checkpoints"]]
    assert whats == ["step 20", "step 40", "validation"]
    assert {name: [one["seed"] for one in runs] for name, runs in found["runs"].items()} == {
        "torch": [0, 1, 2],
        "warploom": [0, 1, 2],
    }
    last: dict[str, Any] = found["checkpoints"][-1]
    assert (last["least"], last["greatest"], last["margin"]) == (20, 22, 1)
    assert last["losses"] == [20.9, 21.9, 22.9]


def test_losses_outside_the_spread_end_in_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, 1.1)
    assert done.exit_code == 3
    assert done.stdout.count("OUTSIDE") == 3


def test_every_loss_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(monkeypatch, 0.0, "--picture", str(tmp_path / "losses.png")).exit_code == 0
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_both_implementations_are_trained_in_earnest() -> None:
    arguments = ["--tiny", "--steps", "20", "--seeds", "3", "--batch", "1", "--json"]
    done = CliRunner().invoke(loss_spread.main, arguments)
    assert done.exit_code in (0, loss_spread.WRONG), done.output
    runs = json.loads(done.stdout)["runs"]
    for ours, peer in zip(runs["warploom"], runs["torch"], strict=True):
        assert ours["losses"] == pytest.approx(peer["losses"], abs=0.05)
    firsts = {one["losses"][0] for one in runs["torch"]}
    assert len(firsts) == 3


def test_each_recipe_is_held_against_seeds_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """One recipe is further out than all: it is named, and by how much."""

    class Recipes(StandIn):
        def __init__(self, settings: Settings, *rest: Any) -> None:
            super().__init__(settings, *rest)
            self.level += 3.25 if settings.recipe == "delayed" else 0

    monkeypatch.setattr(loss_spread, "Trainer", Recipes)
    monkeypatch.setattr(StandIn, "error", 0.0)
    asked = ["--tiny", "--steps", "40", "--seeds", "3", "--recipes"]
    for recipe, code in (("rowwise", 0), ("delayed", loss_spread.WRONG)):
        monkeypatch.setattr(loss_spread, "RECIPES", (recipe,))
        assert CliRunner().invoke(loss_spread.main, asked).exit_code == code
    monkeypatch.setattr(loss_spread, "RECIPES", ("rowwise", "delayed"))
    done = CliRunner().invoke(loss_spread.main, [*asked, "--json"])
    assert done.exit_code == loss_spread.WRONG
    table = json.loads(done.stdout)["recipes"]
    assert table["rowwise"]["within"] and table["rowwise"]["beyond"] == 0
    assert table["delayed"]["beyond"] == pytest.approx(0.25)  # seeds 0 to 2, and a margin of 1


def test_recipes_train_in_earnest() -> None:
    asked = ["--tiny", "--steps", "20", "--seeds", "3", "--batch", "1", "--recipes"]
    done = CliRunner().invoke(loss_spread.main, asked)
    assert done.exit_code in (0, loss_spread.WRONG), done.output
    for recipe in loss_spread.RECIPES:
        assert recipe in done.stdout
    assert "within" in done.stdout


@pytest.fixture
def activated_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activated, "_KEY", "CPU")
    monkeypatch.setattr(activated, "LEAST", 64**3)
    monkeypatch.setitem(devices.reasons, -1, None)


def test_fp32_is_of_torchs_modules_and_activated_for_one_contender(
    activated_on_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds, activations = set[tuple[str, bool]](), list[object]()
    activate = activated.activate

    class Fp32(StandIn):
        def __init__(self, settings: Settings, *rest: Any) -> None:
            super().__init__(settings, *rest)
            kinds.add((settings.implementation, settings.fp32))

    monkeypatch.setattr(warploom.fp32, "activate", lambda: activations.append(1) or activate())
    results = tmp_path / "results.json"
    done = run(monkeypatch, 0.0, "--seeds", "3", "--fp32", "--results", str(results), trainer=Fp32)
    assert done.exit_code == 0, done.output
    assert kinds == {("torch", True)}
    # A first one, which says whether it can be, then seeds, rounds of times, and GEMMs.
    assert len(activations) == 1 + 3 + fp32_steps.ROUNDS + 1 + 1
    found = json.loads(results.read_text())
    assert found["within"] and set(found["step seconds"]) == {"torch", "warploom"}
    assert done.stdout.count("of the last 20 losses of each seed 10.0000 11.0000 12.0000") == 2
    assert CliRunner().invoke(loss_spread.main, ["--fp32", "--recipes"]).exit_code == 2


def test_fp32_that_cannot_be_activated_is_refused_before_a_model_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All seeds were trained by torch first, and the program then ended in a traceback."""

    def refuse() -> None:
        raise ProblemError("torch without CUDA", rule="must have it", fix="install it")

    monkeypatch.setattr(warploom.fp32, "activate", refuse)
    monkeypatch.setattr(loss_spread, "run", None)
    done = CliRunner().invoke(loss_spread.main, ["--fp32"])
    assert done.exit_code == 2 and "--fp32: torch without CUDA" in done.output, done.output


def test_the_gemms_of_a_step_in_fp32_are_named(activated_on_cpu: None) -> None:
    texts = python_texts.load(docstrings=False)
    settings = Settings(TINY, "torch", False, 0, 40, 1, 1e-3, texts.digest, fp32=True)
    found = fp32_steps.gemms(Trainer(settings, texts, torch.device("cpu")))
    calls = {"addmm": 0, "mm": 0}
    for one in found:
        assert one["by"] == "fp32" and "_terms3_narrow_" in one["kernel"]
        calls[one["operator"]] += one["calls"]
    assert calls == {"addmm": 4 * 2 + 1, "mm": 2 * (4 * 2 + 1)}  # four layers in each block, a head


def test_recipes_are_held_against_bf16_of_their_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with the best seed would look better than bf16, whatever the recipe does."""

    class Recipes(StandIn):
        def __init__(self, settings: Settings, *rest: Any) -> None:
            super().__init__(settings, *rest)
            self.level -= 0.25 * (settings.recipe == "fp4_qat") + 0.5 * settings.learning_rate

    monkeypatch.setattr(loss_spread, "Trainer", Recipes)
    monkeypatch.setattr(StandIn, "error", 0.125)
    asked = ["--tiny", "--steps", "40", "--seeds", "3", "--pairs", "rowwise", "--pairs", "fp4_qat"]
    done = CliRunner().invoke(loss_spread.main, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    found = {name: row["validation"] for name, row in json.loads(done.stdout)["pairs"].items()}
    assert found["torch, bf16"]["mean"] == pytest.approx(-0.125)
    assert found["rowwise"] == {"mean": 0, "standard error": 0}
    assert found["fp4_qat"]["mean"] == pytest.approx(-0.25)
    assert found["learning rate x 1.25"]["mean"] == pytest.approx(-0.125 * 3e-3)
    shown = CliRunner().invoke(loss_spread.main, asked).stdout
    assert "-0.2500 +- 0.0000" in shown and "bf16, seed by seed" in shown
