"""Whether a GPT trained on Warploom's kernels learns as on torch's: losses beside those of seeds.

    python examples/loss_spread.py --json > spread.json
    python examples/loss_spread.py --recipes       # fp8 and fp4, beside bf16 on Warploom's kernels
    python examples/loss_spread.py --fp32          # warploom.fp32.activate(), beside torch's fp32
    python examples/loss_spread.py --pairs rowwise --pairs fp4_qat --seeds 3 --steps 80

train_gpt is run with five seeds on torch's modules and with the same on Warploom's. What another
seed changes is the measure: every 20 steps, the mean loss of the last 20 of every Warploom run must
lie between the least and the greatest of torch's runs, widened by a margin. The margin is how far
torch's outermost run lies from the next one: within so much of the range of the other four lies
each run of torch. Validation losses at the end are held the same way. Exit code 3: one is outside.

With --recipes, the seeds are of Warploom's layers in bf16, and each recipe is trained with the
first one: a smaller model and fewer steps, one table. A recipe is "within", or so much is said by
how many nats it is beyond the margin, where it is furthest out.

With --fp32, all runs are of torch's modules in fp32, the seeds on torch's SIMT kernels, and the
same through `warploom.fp32.activate()`: the model and steps of --recipes. The time of a step, the
contenders in turn, and the GEMMs of one are told too.

A seed decides weights and texts, so that a recipe is near bf16 of its own seed wherever that lies
among the others. --pairs trains a recipe with every seed and tells its mean difference from bf16 of
the same seed, with its standard error. Three controls stand beside it: torch's kernels, which only
round otherwise, and learning rates that are lower and higher, as noise in gradients makes Adam's
steps smaller. A recipe whose difference is that of a control needs no other cause.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click
import torch

import fp32_steps
import loss_picture
import python_texts
import timing
import warploom
from gpt import Implementation, Size
from train_gpt import FILE, chosen, run
from trainer import Trainer, deterministic
from warploom.errors import WarploomError
from warploom.float8 import RECIPES, Recipe

SMALL = Size(layers=4, width=512, heads=8, context=512)  # recipes, fp32: 11 runs in two minutes
SMALL_STEPS, SMALL_BATCH = 200, 16
RATES = (0.8, 1.25)  # of learning, of the one that the size is made for
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

    @property
    def beyond(self) -> float:
        """How far the furthest is out of the range and its margin; 0 where none is."""
        low, high = self.least - self.margin, self.greatest + self.margin
        return max(0.0, *(max(low - loss, loss - high) for loss in self.losses))


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
@click.option("--steps", type=click.IntRange(WINDOW), help="300, with --recipes or --fp32 200.")
@click.option("--seeds", type=click.IntRange(3), default=5, show_default=True)
@click.option("--batch", type=click.IntRange(1), help="Rows a step: 32, tiny 4, of recipes 16.")
@click.option("--recipes", is_flag=True, help="Hold each recipe against bf16 on Warploom.")
@click.option("--fp32", is_flag=True, help="Hold fp32 by activate() against torch's fp32.")
@click.option(
    "--pairs",
    "paired",
    type=click.Choice(RECIPES),
    multiple=True,
    help="Hold this recipe against bf16 seed by seed, beside controls; may be repeated.",
)
@click.option("--picture", type=FILE, help="Draw all losses, as .svg or .png.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--results", type=FILE, help="Write the JSON object to a file, in one line.")
def main(
    *,
    tiny: bool,
    steps: int | None,
    seeds: int,
    batch: int | None,
    recipes: bool,
    fp32: bool,
    paired: tuple[Recipe, ...],
    picture: Path | None,
    as_json: bool,
    results: Path | None,
) -> None:
    """Compare the losses of training on Warploom's kernels with those of seeds on torch's."""
    if recipes and fp32:
        raise click.UsageError("--recipes: is of bf16: leave it out, or --fp32")
    if fp32:
        try:
            with warploom.fp32.activate():
                pass
        except WarploomError as error:  # such as without a GPU, before a model is trained
            raise click.UsageError(f"--fp32: {error}") from error
    if picture is not None:
        loss_picture.require()
    texts = python_texts.load(docstrings=not tiny)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = (recipes or fp32 or bool(paired)) and not tiny
    steps = steps or (SMALL_STEPS if small else 300)

    def make(
        implementation: Implementation, seed: int, recipe: Recipe | None = None, rate: float = 1
    ) -> Trainer:
        settings = chosen(
            texts, implementation, seed, tiny=tiny, steps=steps, batch=batch, recipe=recipe
        )
        settings = replace(settings, learning_rate=rate * settings.learning_rate)
        if small:
            settings = replace(settings, size=SMALL, batch=batch or SMALL_BATCH)
        if fp32:
            settings = replace(settings, implementation="torch", fp32=True)
        return Trainer(settings, texts, device)

    def train(
        implementation: Implementation, seed: int, recipe: Recipe | None = None, rate: float = 1
    ) -> Run:
        """One run from its first step to its validation loss."""
        activated = fp32 and implementation == "warploom"
        with deterministic(), warploom.fp32.activate() if activated else nullcontext():
            trainer = make(implementation, seed, recipe, rate)
            speed = run(trainer, steps, None, steps, quiet=as_json)
            return Run(seed, trainer.losses, trainer.validate(), speed)

    if paired:
        every = range(seeds)
        runs = {"bf16": [train("warploom", seed) for seed in every]}
        runs["torch, bf16"] = [train("torch", seed) for seed in every]
        for rate in RATES:
            runs[f"learning rate x {rate}"] = [train("warploom", s, None, rate) for s in every]
        runs |= {recipe: [train("warploom", seed, recipe) for seed in every] for recipe in paired}
        result = pairs_document(runs)
        shown = pairs_table(result)
    elif recipes:
        runs = {"bf16": [train("warploom", seed) for seed in range(seeds)]}
        runs |= {recipe: [train("warploom", 0, recipe)] for recipe in RECIPES}
        result = recipe_document(runs)
        shown = recipe_table(result)
    else:
        if fp32:
            torch.set_float32_matmul_precision("highest")
        implementations: tuple[Implementation, ...] = ("torch", "warploom")
        runs = {name: [train(name, seed) for seed in range(seeds)] for name in implementations}
        found = verdicts(runs["torch"], runs["warploom"])
        result, shown = document(runs, found), "\n".join(map(told, found))
        if fp32:
            with deterministic():
                result["step seconds"] = fp32_steps.step_seconds(lambda: make("torch", 0), device)
                result["gemms of a step"] = fp32_steps.gemms(make("torch", 0))
            shown += "\n" + fp32_table(result)
    if picture is not None:
        draw(runs, picture)
    click.echo(json.dumps(result, indent=2) if as_json else shown)
    if results is not None:
        results.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if not result["within"]:
        raise click.exceptions.Exit(WRONG)


def pairs_document(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """The mean differences from bf16 of the same seed, and their standard errors, for JSON."""
    values = {
        name: {"loss": [*map(_last, some)], "validation": [run.validation for run in some]}
        for name, some in runs.items()
    }
    peers = values.pop("bf16")
    table = {
        name: {what: _difference(of_what, peers[what]) for what, of_what in of_name.items()}
        for name, of_name in values.items()
    }
    every = {name: [asdict(one) for one in some] for name, some in runs.items()}
    return {"torch version": torch.__version__, "within": True, "pairs": table, "runs": every}


def _last(run: Run) -> float:
    """The mean loss of the last steps."""
    return fmean(run.losses[-WINDOW:])


def _difference(losses: Sequence[float], peers: Sequence[float]) -> dict[str, float]:
    found = [loss - peer for loss, peer in zip(losses, peers, strict=True)]
    return {"mean": fmean(found), "standard error": stdev(found) / len(found) ** 0.5}


def pairs_table(result: Mapping[str, Any]) -> str:
    """The same for a person."""
    lines = [f"{'less bf16 of the same seed':<28}{'loss':>18}{'validation':>20}"]
    for name, row in result["pairs"].items():
        told = [f"{one['mean']:+.4f} +- {one['standard error']:.4f}" for one in row.values()]
        lines.append(f"{name:<28}{told[0]:>18}{told[1]:>20}")
    losses = " ".join(f"{fmean(run['losses'][-WINDOW:]):.4f}" for run in result["runs"]["bf16"])
    return "\n".join([*lines, f"bf16, seed by seed: {losses}"])


def recipe_document(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Each recipe beside the seeds of bf16, for JSON."""
    table = {}
    for recipe, some in runs.items():
        if recipe == "bf16":
            continue
        checkpoints = verdicts(runs["bf16"], some)
        worst = max(checkpoints, key=lambda checkpoint: checkpoint.beyond)
        table[recipe] = {
            "within": worst.beyond == 0,
            "beyond": worst.beyond,
            "where": worst.what if worst.beyond else "",
            "loss": checkpoints[-2].losses[0],
            "validation": some[0].validation,
            "bytes per second": some[0].bytes_per_second,
        }
    last = verdicts(runs["bf16"], runs["bf16"])[-2:]
    return {
        "torch version": torch.__version__,
        "within": all(row["within"] for row in table.values()),
        "recipes": table,
        "bf16": {
            verdict.what: {"least": verdict.least, "greatest": verdict.greatest}
            | {"margin": verdict.margin}
            for verdict in last
        },
        "runs": {name: [asdict(one) for one in some] for name, some in runs.items()},
    }


def recipe_table(result: Mapping[str, Any]) -> str:
    """The same for a person."""
    lines = [f"{'':<20}{'loss':>9}{'validation':>12}  beside {len(result['runs']['bf16'])} seeds"]
    (_, end), (_, validation) = result["bf16"].items()
    lines += [
        f"{'bf16, ' + bound:<20}{end[bound]:>9.4f}{validation[bound]:>12.4f}"
        for bound in ("least", "greatest")
    ]
    for recipe, row in result["recipes"].items():
        said = "within" if row["within"] else f"{row['beyond']:.4f} beyond, {row['where']}"
        lines.append(f"{recipe:<20}{row['loss']:>9.4f}{row['validation']:>12.4f}  {said}")
    return "\n".join(lines)


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


def fp32_table(result: Mapping[str, Any]) -> str:
    """Last losses, the time of a step and its GEMMs, in fp32, for a person."""
    lines = []
    for name, runs in result["runs"].items():
        ends = [sum(one["losses"][-WINDOW:]) / WINDOW for one in runs]
        losses = " ".join(f"{loss:.4f}" for loss in ends)
        spread = f"spread {max(ends) - min(ends):.4f}"
        lines.append(f"{name:<10}mean of the last {WINDOW} losses of each seed {losses}: {spread}")
    seconds = timing.medians(result["step seconds"])
    times = ", ".join(f"{name} {1e3 * taken:.2f} ms" for name, taken in seconds.items())
    lines.append(f"step      {times}: {seconds['torch'] / seconds['warploom']:.3f} times as fast")
    for one in result["gemms of a step"]:
        kernel = one.get("kernel", "")
        size = f"{one['m']}x{one['n']}x{one['k']}"
        lines.append(f"{one['calls']:>3} x {one['operator']:<6}{size:<16}{one['by']:<7}{kernel}")
    return "\n".join(lines)


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
