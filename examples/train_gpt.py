"""Train a byte-level GPT on Python's own documentation, on Warploom's kernels or on torch's.

    python examples/train_gpt.py --tiny                        # seconds, also without a GPU
    python examples/train_gpt.py --checkpoint gpt.npz --picture losses.svg
    python examples/train_gpt.py --checkpoint gpt.npz --resume

Everything that is random follows `--seed`. A run that was stopped and resumed ends in the same bits
as one that was not, on the same machine and versions.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import loss_picture
import python_texts
from gpt import Implementation, Size
from python_texts import Texts
from trainer import Settings, Trainer, deterministic
from warploom.float8 import RECIPES, Recipe

WHOLE = Size(layers=6, width=512, heads=8, context=512)
TINY = Size(layers=2, width=64, heads=2, context=64)
WARM_UP = 10  # steps that compile kernels, and are no part of the speed
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option("--tiny", is_flag=True, help="2 layers of width 64, for a CPU.")
@click.option("--steps", type=click.IntRange(1), help="How many in all: 2000, tiny 40.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--batch", type=click.IntRange(1), help="Rows a step: 32, tiny 4.")
@click.option(
    "--implementation",
    type=click.Choice(["warploom", "torch"]),
    default="warploom",
    show_default=True,
    help="Whose kernels compute; the model is the same.",
)
@click.option("--recipe", type=click.Choice(RECIPES), help="Train in fp8: of warploom alone.")
@click.option(
    "--dropout-blocks",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Drop blocks of the input of MLPs' last layers with this probability: of warploom alone.",
)
@click.option("--compile", "compiled", is_flag=True, help="Run the model through torch.compile.")
@click.option("--device", help="Such as cpu or cuda: by default the GPU, where there is one.")
@click.option("--checkpoint", type=FILE, help="Where the run is kept, as npz.")
@click.option("--save-every", type=click.IntRange(1), default=100, show_default=True)
@click.option("--resume", is_flag=True, help="Go on from the checkpoint.")
@click.option("--stop-at", type=click.IntRange(1), help="Stop after so many of the steps.")
@click.option("--picture", type=FILE, help="Draw the losses, as .svg or .png.")
@click.option("--sample", "sampled", type=click.IntRange(0), default=200, help="Bytes to write.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    *,
    tiny: bool,
    steps: int | None,
    seed: int,
    batch: int | None,
    implementation: Implementation,
    recipe: Recipe | None,
    dropout_blocks: float,
    compiled: bool,
    device: str | None,
    checkpoint: Path | None,
    save_every: int,
    resume: bool,
    stop_at: int | None,
    picture: Path | None,
    sampled: int,
    as_json: bool,
) -> None:
    """Train a byte-level GPT on Python's own documentation."""
    if resume and checkpoint is None:
        raise click.UsageError("--resume: must have a run to go on with: add --checkpoint FILE")
    if recipe and implementation == "torch":
        raise click.UsageError("--recipe: is of warploom's layers: leave --implementation out")
    if dropout_blocks and (recipe or implementation == "torch"):
        raise click.UsageError(
            "--dropout-blocks: is of warploom's 16-bit layers: leave --recipe and --implementation "
            "out"
        )
    if picture is not None:
        loss_picture.require()
    texts = python_texts.load(docstrings=not tiny)
    settings = chosen(
        texts,
        implementation,
        seed,
        tiny=tiny,
        steps=steps,
        batch=batch,
        compiled=compiled,
        recipe=recipe,
        dropout_blocks=dropout_blocks,
    )
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with deterministic():
        trainer = Trainer(settings, texts, where)
        if resume and checkpoint is not None:
            trainer.restore(checkpoint)
        last = min(settings.steps, stop_at or settings.steps)
        speed = run(trainer, last, checkpoint, save_every, quiet=as_json)
        result = {
            "implementation": implementation,
            "recipe": recipe,
            "dropout blocks": dropout_blocks,
            "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "steps": trainer.step,
            "losses": trainer.losses,
            "validation loss": trainer.validate(),
            "bytes per second": speed,
            "texts": texts.digest,
            "sample": trainer.sample(sampled),
        }
    if picture is not None:
        curve = loss_picture.smoothed(trainer.losses, 10)
        loss_picture.draw({implementation: [curve]}, picture, "train_gpt: mean loss of 10 steps")
    click.echo(json.dumps(result, indent=2) if as_json else told(result))


def chosen(
    texts: Texts,
    implementation: Implementation,
    seed: int,
    *,
    tiny: bool,
    steps: int | None,
    batch: int | None,
    compiled: bool = False,
    recipe: Recipe | None = None,
    dropout_blocks: float = 0.0,
) -> Settings:
    """The settings of a run; None: as many as the size is made for."""
    return Settings(
        size=TINY if tiny else WHOLE,
        implementation=implementation,
        compile=compiled,
        seed=seed,
        steps=steps or (40 if tiny else 2000),
        batch=batch or (4 if tiny else 32),
        learning_rate=3e-3 if tiny else 1e-3,
        texts=texts.digest,
        recipe=recipe,
        dropout_blocks=dropout_blocks,
    )


def run(
    trainer: Trainer, last: int, checkpoint: Path | None, save_every: int, *, quiet: bool = False
) -> float | None:
    """Train until `last` steps are done; return bytes a second, None of too few steps to say."""
    settings = trainer.settings
    columns = (
        TextColumn(f"{settings.implementation}, seed {settings.seed}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    began, first = 0.0, trainer.step + WARM_UP
    with Progress(*columns, console=console, disable=quiet or not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=settings.steps, completed=trainer.step, loss="")
        while trainer.step < last:
            if trainer.step == first:
                began = now(trainer)
            trainer.advance()
            done = trainer.step
            if done % 10 == 0 or done == last:  # to read the loss is to wait for the GPU
                progress.update(bar, completed=done, loss=f"loss {trainer.losses[-1]:.3f}")
            if checkpoint is not None and (done % save_every == 0 or done == last):
                trainer.save(checkpoint)
    seconds = now(trainer) - began
    counted = (last - first) * settings.batch * settings.size.context
    return counted / seconds if began and counted > 0 else None


def now(trainer: Trainer) -> float:
    """Seconds on a clock, once the GPU has done all that it was given."""
    if trainer.masters["positions"].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def told(result: dict[str, Any]) -> str:
    """The result for a person."""
    speed = result["bytes per second"]
    lines = [
        f"steps            {result['steps']} on {result['device']}, {result['implementation']}",
        f"loss             {result['losses'][-1]:.4f}",
        f"validation loss  {result['validation loss']:.4f}",
        *([f"speed            {speed:,.0f} bytes a second"] if speed else []),
        "sample:",
        result["sample"],
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
