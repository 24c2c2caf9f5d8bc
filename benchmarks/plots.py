"""The three kinds of picture, from plain numbers: a heat map, sorted ratios, rates over length.

Nothing is told by colour alone: numbers stand in a heat map's fields, and what is won, tied and
lost, and each contender of a chart, has a mark of its own. Needs matplotlib.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil, exp, isnan, log
from typing import Any

from benchmarks.protocol import TIE
from benchmarks.wording import RATIO
from warploom.errors import ConfigurationError

_FASTER = f"{RATIO}, above 1: Warploom is faster"
_VERDICTS = {  # of sorted ratios: colour and mark, which the colour-blind tell apart
    "won": ("#0072b2", "o"),
    "tied": ("#999999", "s"),
    "lost": ("#d55e00", "v"),
}
_OURS = ("#000000", "o", "-")  # colour, mark and stroke of a contender
_PEERS = (  # of a family's peers, in their order
    ("#009e73", "D", "-."),
    ("#cc79a7", "v", ":"),
    ("#0072b2", "s", "--"),
    ("#d55e00", "^", "--"),
    ("#e69f00", "x", ":"),
)
_OTHER = ("#777777", ".", "-")
_MARKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 2.5, 3, 4, 6, 8)  # of ratios


def figure(width: float, height: float) -> Any:  # noqa: ANN401 (matplotlib is optional)
    """An empty picture of that many inches; ConfigurationError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "pictures without matplotlib",
            rule="it is an optional dependency",
            fix="pip install 'warploom[plot]'",
        ) from error
    # The same figures give the same bytes: no random ids. Text stays text, to be searched and read.
    matplotlib.rcParams.update({"svg.hashsalt": "warploom", "svg.fonttype": "none"})
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


# ---- Heat map ------------------------------------------------------------------------------------


def heat(
    ratios: Mapping[tuple[str, int], float],
    groups: Sequence[Sequence[int]],
    title: str,
    axis: str,
    reason: str = "",
) -> Any:  # noqa: ANN401
    """Ratios by row and number on `axis`; the numbers of each group have columns of their own.

    Fields without a ratio are hatched, which `reason` explains under the map.
    """
    rows = list(dict.fromkeys(row for row, _ in ratios))
    picture = figure(2.6 + 0.5 * sum(map(len, groups)), 1.6 + 0.3 * len(rows))
    panels = picture.subplots(
        1, len(groups), sharey=True, squeeze=False, width_ratios=[len(g) for g in groups]
    )[0]
    limit = max(abs(log(ratio)) for ratio in ratios.values())
    for axes, numbers in zip(panels, groups, strict=True):
        image = _map(axes, [[ratios.get((row, n)) for n in numbers] for row in rows], limit)
        axes.set_xticks(range(len(numbers)), [str(n) for n in numbers], fontsize=8)
        axes.set_xlabel(axis if numbers is groups[0] else f"{axis}, ragged", fontsize=8)
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.tick_params(length=0)
    bar = picture.colorbar(image, ax=panels, pad=0.01, aspect=30)
    marks = [mark for mark in _MARKS if abs(log(mark)) <= limit + 1e-9]
    bar.set_ticks([log(mark) for mark in marks], labels=[f"{mark:g}" for mark in marks])
    bar.ax.tick_params(labelsize=8)
    picture.suptitle(f"{title}\n{_FASTER}", fontsize=9)
    if reason:
        picture.supxlabel(f"hatched: {reason}", fontsize=8)
    return picture


def _map(axes: Any, grid: Sequence[Sequence[float | None]], limit: float) -> Any:  # noqa: ANN401
    """Colours on a scale of logarithms, and the numbers."""
    logs = [[log(x) if x else float("nan") for x in line] for line in grid]
    image = axes.imshow(logs, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    axes.patch.set(hatch="////", edgecolor="0.75", facecolor="white")
    for (y, line), x in product(enumerate(logs), range(len(logs[0]))):
        if not isnan(line[x]):
            colour = "white" if abs(line[x]) > 0.7 * limit else "black"
            text = f"{exp(line[x]):.2f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
    return image


# ---- Sorted ratios -------------------------------------------------------------------------------


def ranked(
    panels: Mapping[str, Sequence[tuple[float, str]]],
    counts: Mapping[str, str],
    losses: Mapping[str, Sequence[str]],
    peers: Mapping[str, str],
    title: str,
) -> Any:  # noqa: ANN401
    """Every (ratio, verdict) of each panel, sorted, with `counts`, `losses` and `peers` in words.

    Panels of one row have one scale.
    """
    columns = min(2, len(panels))
    rows = ceil(len(panels) / columns)
    picture = figure(0.6 + 4.8 * columns, 1.1 + 2.6 * rows)
    grid = picture.subplots(rows, columns, sharey="row", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, cells) in zip(grid.flat, panels.items(), strict=False):
        handles = _curve(axes, sorted(cells))
        axes.set_title(f"{name}: {counts[name]}", fontsize=9)
        lines = [line for each in losses[name] for line in textwrap.wrap(each, 82)]
        text = "\n".join(["lost:", *lines] if lines else [])
        axes.text(0.02, 0.97, text, transform=axes.transAxes, va="top", fontsize=7)
        axes.set(xticks=[], yscale="log")
        axes.set_xlabel(f"compared with {peers[name]}", fontsize=7.5)
    values = list(panels.values())
    for first, axes in zip(range(0, len(values), columns), grid[:, 0], strict=True):
        row = values[first : first + columns]
        _scale(axes, [ratio for cells in row for ratio, _ in cells])
    picture.suptitle(f"{title}\n{_FASTER}", fontsize=10)
    names = ["won", f"tied, within {TIE:.0%}", "lost"]
    picture.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8)
    return picture


def _scale(axes: Any, ratios: Sequence[float]) -> None:  # noqa: ANN401
    """A scale that ends a little beyond these ratios, with room for words above them."""
    low, high = 0.98 * min(ratios), 1.02 * max(ratios)
    marks = [mark for mark in _MARKS if low <= mark <= high]
    axes.minorticks_off()
    axes.set_ylim(low, max(high, 1.25))
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks], fontsize=8)


def _curve(axes: Any, cells: Sequence[tuple[float, str]]) -> list[Any]:  # noqa: ANN401
    """The marks of won, tied and lost cells, for a legend."""
    axes.axhspan(1 - TIE, 1 + TIE, color="0.9", linewidth=0)
    axes.axhline(1.0, color="0.4", linewidth=0.8)
    handles = []
    for verdict, (colour, mark) in _VERDICTS.items():
        found = [(place, ratio) for place, (ratio, v) in enumerate(cells) if v == verdict]
        places, ratios = ([pair[axis] for pair in found] for axis in (0, 1))
        handles += axes.plot(places, ratios, mark, color=colour, markersize=3.5)
    return handles


# ---- Rates over length ---------------------------------------------------------------------------


def rates(
    panels: Mapping[tuple[str, str], Mapping[str, Sequence[tuple[int, float]]]],
    peers: Sequence[str],
    title: str,
    axis: str,
) -> Any:  # noqa: ANN401
    """TFLOP/s of each contender over `axis`: a panel for each (row, column) of the keys."""
    styles = {"Warploom": _OURS, **dict(zip(peers, _PEERS, strict=False))}
    rows, columns = (list(dict.fromkeys(key[place] for key in panels)) for place in (0, 1))
    picture = figure(0.8 + 3.3 * len(columns), 1.2 + 2.5 * len(rows))
    grid = picture.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    every = sorted({n for lines in panels.values() for points in lines.values() for n, _ in points})
    for (y, row), (x, column) in product(enumerate(rows), enumerate(columns)):
        axes, lines = grid[y][x], panels.get((row, column), {})
        for name, points in lines.items():
            colour, mark, stroke = styles.get(name, _OTHER)
            heavy = name == "Warploom"
            (handles[name],) = axes.plot(
                *zip(*points, strict=True),
                marker=mark,
                linestyle=stroke,
                color=colour,
                markersize=4,
                linewidth=2.2 if heavy else 1.3,
                zorder=3 if heavy else 2,
            )
        measured = {number for points in lines.values() for number, _ in points}
        if absent := ", ".join(str(number) for number in every if number not in measured):
            text = f"{absent}: not measured"
            axes.text(0.97, 0.04, text, transform=axes.transAxes, ha="right", fontsize=7)
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xticks(every, [str(number) for number in every], fontsize=8)
        axes.set_title(f"{column}, {row}", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(color="0.9")
    grid[0][0].set_ylim(bottom=0)
    for axes in grid[-1]:
        axes.set_xlabel(axis, fontsize=8)
    picture.supylabel("TFLOP/s, higher is better", fontsize=9)
    picture.suptitle(title, fontsize=10)
    names = sorted(handles, key=[*styles, *handles].index)
    picture.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=len(names),
        fontsize=8,
        handlelength=4,
    )
    return picture
