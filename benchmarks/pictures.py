"""`python -m benchmarks.pictures --out DIR FILE...`: the pictures of results, as SVG.

Speed-ups as heat maps, over weight and M or over head dimension, mask and length; and all of them
sorted, with their noise. They are drawn from JSON and from nothing else. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from benchmarks.protocol import TIE, read
from warploom.errors import ConfigurationError

CellJson = Mapping[str, Any]
_FIGURE = "fastest peer / Warploom"
_FEWEST = 6  # cells, whose order is worth a picture
_WIDEST = 0.25  # of a ratio from 1, where colours end


def draw(name: str, cells: Sequence[CellJson], folder: Path) -> list[Path]:
    """Draw every picture that these cells are enough for; return their files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, group in groupby(cells, key=kind_of):
        stem = f"{name}_{kind}".replace(" ", "_")
        found = [cell for cell in group if cell["ratio"]]
        weights = [c for c in found if {"m", "n", "k"} <= c["problem"].keys()]
        lengths = [c for c in found if "seq" in c["problem"] and _square(c["problem"])]
        by_weight = {_weight(c["problem"]): c["ratio"] for c in weights}
        if _is_grid(by_weight):
            path = folder / f"{stem}_weights.svg"
            _heat(by_weight, f"{name}, {kind}: {_FIGURE}", "weight [N, K]", "M", path)
            paths.append(path)
        by_length = {_length(c["problem"]): c["ratio"] for c in lengths}
        if _is_grid(by_length):
            path = folder / f"{stem}_lengths.svg"
            _heat(by_length, f"{name}, {kind}: {_FIGURE}", "head dimension", "length", path)
            paths.append(path)
        if len(found) >= _FEWEST:
            path = folder / f"{stem}_sorted.svg"
            _sorted(found, f"{name}, {kind}: {len(found)} cells", path)
            paths.append(path)
    return paths


def kind_of(cell: CellJson) -> str:
    """What cells are grouped by: the type, and of attention the pass where a document has both."""
    problem = cell["problem"]
    return " ".join(str(problem[key]) for key in ("type", "pass") if key in problem)


def _is_grid(ratios: Mapping[tuple[str, int], float]) -> bool:
    """True when most places of a grid of several rows and columns are filled."""
    rows, columns = ({key[axis] for key in ratios} for axis in (0, 1))
    return min(len(rows), len(columns)) > 1 and 2 * len(ratios) > len(rows) * len(columns)


def _square(problem: CellJson) -> bool:
    return bool(problem["heads"] == problem["kv_heads"]) and not problem.get("lengths")


def _weight(problem: CellJson) -> tuple[str, int]:
    return f"{problem['n']}x{problem['k']}", int(problem["m"])


def _length(problem: CellJson) -> tuple[str, int]:
    return f"{problem['dim']} {'causal' if problem['causal'] else 'full'}", int(problem["seq"])


def _figure(width: float, height: float) -> Any:  # noqa: ANN401 (matplotlib is optional)
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "pictures without matplotlib",
            rule="it is an optional dependency",
            fix="pip install 'warploom[plot]'",
        ) from error
    # The same figures give the same bytes: no random ids, and no date below.
    matplotlib.rcParams["svg.hashsalt"] = "warploom"
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:  # noqa: ANN401
    figure.savefig(path, format="svg", metadata={"Date": None})


def _heat(
    ratios: Mapping[tuple[str, int], float], title: str, rows: str, columns: str, path: Path
) -> None:
    names = list(dict.fromkeys(row for row, _ in ratios))
    numbers = sorted({column for _, column in ratios})
    figure = _figure(1.5 + 0.62 * len(numbers), 1.4 + 0.36 * len(names))
    axes = figure.add_subplot()
    nothing = float("nan")
    grid = [[ratios.get((name, number), nothing) for number in numbers] for name in names]
    image = axes.imshow(grid, cmap="RdBu", vmin=1 - _WIDEST, vmax=1 + _WIDEST, aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            if value == value:  # not NaN: measured
                colour = "white" if abs(value - 1) > 0.7 * _WIDEST else "black"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(numbers)), [str(number) for number in numbers], fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(title=title, xlabel=columns, ylabel=rows)
    axes.title.set_fontsize(9)
    figure.colorbar(image, ax=axes)
    _save(figure, path)


def _sorted(cells: Sequence[CellJson], title: str, path: Path) -> None:
    ordered = sorted(cells, key=lambda cell: float(cell["ratio"]))
    ratios = [cell["ratio"] for cell in ordered]
    noise = [
        cell["ratio"] * sum((entry["spread"] or 0) / 2 for entry in cell["entries"][:2])
        for cell in ordered
    ]
    figure = _figure(7.0, 3.4)
    axes = figure.add_subplot()
    axes.axhspan(1 - TIE, 1 + TIE, color="0.9", label=f"tied, within {TIE:.0%}")
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    places = range(len(ratios))
    axes.errorbar(places, ratios, noise, fmt=".", markersize=4, linewidth=0.8, label="cells")
    axes.set(title=title, xlabel="cells, sorted", ylabel=_FIGURE)
    axes.title.set_fontsize(9)
    axes.legend(fontsize=8)
    _save(figure, path)


_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command()
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
def main(files: Sequence[Path], out: Path) -> None:
    """Draw the pictures of documents of results."""
    for file in files:
        document = read(file)
        for path in draw(file.stem, document["cells"], out):
            click.echo(str(path))


if __name__ == "__main__":
    main()
