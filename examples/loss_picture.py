"""Pictures of losses over steps. matplotlib is optional: `require` says so before a run begins."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

MARKS = ("-", "--", "-.", ":")  # strokes, which the colour-blind tell apart


def require() -> None:
    """Raise ClickException where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException(
            "a picture without matplotlib: it is an optional dependency: "
            "pip install 'warploom[plot]', or leave out --picture"
        )


def smoothed(losses: Sequence[float], steps: int) -> list[float]:
    """Of each step, the mean of its loss and of those before it: of `steps` losses at most."""
    ends = range(1, len(losses) + 1)
    windows = [losses[max(0, end - steps) : end] for end in ends]
    return [sum(window) / len(window) for window in windows]


def draw(curves: Mapping[str, Sequence[Sequence[float]]], path: Path, title: str) -> None:
    """Write a picture of named curves, each name's in one colour; the suffix decides the format."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4.5), layout="constrained", facecolor="white")
    axes = picture.subplots()
    for index, (name, runs) in enumerate(curves.items()):
        for run, losses in enumerate(runs):
            axes.plot(
                range(1, len(losses) + 1),
                losses,
                MARKS[index % len(MARKS)],
                color=f"C{index}",
                linewidth=1,
                label=name if run == 0 else None,
            )
    axes.set(title=title, xlabel="step", ylabel="loss, nats a byte")
    axes.grid(alpha=0.3)
    axes.legend()
    picture.savefig(path)
