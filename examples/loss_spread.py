"""Whether a GPT trained on Warploom's kernels learns as on torch's: losses beside those of seeds.

    python examples/loss_spread.py --json > spread.json

train_gpt is run with five seeds on torch's modules and with the same on Warploom's. What another
seed changes is the measure: every 20 steps, the mean loss of the last 20 of every Warploom run must
lie between the least and the greatest of torch's runs, widened by a margin. The margin is how far
torch's outermost run lies from the next one: within so much of the range of the other four lies
each run of torch. Validation losses at the end are held the same way. Exit code 3: one is outside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

import loss_picture
import python_texts
from gpt import Implementation
from train_gpt import FILE, chosen, run
from trainer import Trainer, deterministic

WINDOW = 20  # steps from one checkpoint to the next, and of the mean
WRONG = 3  # the exit code


@dataclass(frozen=True, slots=True)
class Run:
    """What one seed came to."""

    seed: int
    losses: list[float]
    validation: float
    bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Warploom's losses at a checkpoint, and torch's range and margin there."""

    what: str
    least: float
    greatest: float
    margin: float
    losses: tuple[float, ...]

    @property
    def between(self) -> bool:
        """Whether all lie in torch's range as it is."""
        return all(self.least <= loss <= self.greatest for loss in self.losses)

    @property
    def within(self) -> bool:
        """Whether all lie in torch's range, widened by the margin."""
        low, high = self.least - self.margin, self.greatest + self.margin
        return all(low <= loss <= high for loss in self.losses)


def verdict(what: str, peers: Sequence[float], losses: Sequence[float]) -> Verdict:
    """Hold `losses` against those of at least three peers."""
    order = sorted(peers)
    margin = max(order[1] - order[0], order[-1] - order[-2])
    return Verdict(what, order[0], order[-1], margin, tuple(losses))


def verdicts(peers: Sequence[Run], runs: Sequence[Run]) -> list[Verdict]:
    """Hold runs against those of torch at every checkpoint, and by their validation losses."""
    found = []
    for step in range(WINDOW, len(peers[0].losses) + 1, WINDOW):
        means = [
            [sum(one.losses[step - WINDOW : step]) / WINDOW for one in some]
            for some in (peers, runs)
        ]
        found.append(verdict(f"step {step}", *means))
    ends = [[one.validation for one in some] for some in (peers, runs)]
    return [*found, verdict("validation", *ends)]


@click.command()
@click.option("--tiny", is_flag=True, help="The tiny model, for a CPU.")
@click.option("--steps", type=click.IntRange(WINDOW), default=300, show_default=True)
@click.option("--seeds", type=click.IntRange(3), default=5, show_default=True)
@click.option("--batch", type=click.IntRange(1), help="Rows a step: 32, tiny 4.")
@click.option("--picture", type=FILE, help="Draw all losses, as .svg or .png.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    *, tiny: bool, steps: int, seeds: int, batch: int | None, picture: Path | None, as_json: bool
) -> None:
    """Compare the losses of training on Warploom's kernels with those of seeds on torch's."""
    if picture is not None:
        loss_picture.require()
    texts = python_texts.load(docstrings=not tiny)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs: dict[str, list[Run]] = {}
    implementations: tuple[Implementation, ...] = ("torch", "warploom")
    for implementation in implementations:
        runs[implementation] = []
        for seed in range(seeds):
            settings = chosen(texts, implementation, seed, tiny=tiny, steps=steps, batch=batch)
            with deterministic():
                trainer = Trainer(settings, texts, device)
                speed = run(trainer, steps, None, steps, quiet=as_json)
                ended = Run(seed, trainer.losses, trainer.validate(), speed)
            runs[implementation].append(ended)
    found = verdicts(runs["torch"], runs["warploom"])
    if picture is not None:
        draw(runs, picture)
    if as_json:
        click.echo(json.dumps(document(runs, found), indent=2))
    else:
        click.echo("\n".join(map(told, found)))
    if not all(one.within for one in found):
        raise click.exceptions.Exit(WRONG)


def document(runs: Mapping[str, Sequence[Run]], found: Sequence[Verdict]) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "torch version": torch.__version__,
        "within": all(one.within for one in found),
        "between": sum(one.between for one in found),
        "checkpoints": [
            {**asdict(one), "between": one.between, "within": one.within} for one in found
        ],
        "runs": {name: [asdict(one) for one in some] for name, some in runs.items()},
    }


def told(one: Verdict) -> str:
    """One line for a person."""
    losses = " ".join(f"{loss:.4f}" for loss in one.losses)
    where = "between" if one.between else "within the margin" if one.within else "OUTSIDE"
    return (
        f"{one.what:<10}  torch {one.least:.4f} to {one.greatest:.4f} (margin {one.margin:.4f})  "
        f"warploom {losses}: {where}"
    )


def draw(runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Draw the smoothed losses of every run."""
    curves = {
        name: [loss_picture.smoothed(one.losses, WINDOW) for one in some]
        for name, some in runs.items()
    }
    loss_picture.draw(curves, path, f"train_gpt: mean loss of {WINDOW} steps, every seed")


if __name__ == "__main__":
    main()
