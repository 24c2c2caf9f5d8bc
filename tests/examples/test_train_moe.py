"""examples/train_moe.py, tiny: both models learn, and learn the same."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

import train_moe


def run(*arguments: str) -> str:
    done = CliRunner().invoke(train_moe.main, ["--tiny", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_losses_fall_alike_with_warploom_and_without() -> None:
    """Gradients of experts that are wrong, or reach no weight, part the losses."""
    found: dict[str, Any] = json.loads(run("--json"))
    ours, torchs = found["losses"]["warploom"], found["losses"]["torch"]
    assert ours[-1] < 0.8 * ours[0] and len(ours) == 20
    assert all(abs(one - other) < 0.02 * other for one, other in zip(ours, torchs, strict=True))
    assert "experts" in found["patch"] and found["seconds"].keys() == found["losses"].keys()


def test_a_person_is_shown_losses_and_times() -> None:
    lines = run("--steps", "2").splitlines()
    assert lines[-1].startswith("warploom  loss 5.") and lines[-1].endswith(" ms a step")


def test_a_row_that_is_longer_than_the_text_is_refused() -> None:
    """An error of torch's named a dimension."""
    done = CliRunner().invoke(train_moe.main, ["--tiny", "--context", "999999999"])
    assert done.exit_code == 2 and "--context 999999999: must be at most" in done.output
