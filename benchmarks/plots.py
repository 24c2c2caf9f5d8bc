"""The kinds of picture, from plain numbers: bars, a heat map, sorted ratios, rates over length.

Nothing is told by colour alone: numbers stand in a heat map's fields, and what is won, tied and
lost, and each contender of a chart, has a mark of its own. Texts of any length are fitted to the
space that they have. What takes sentences stands on the page, below the picture. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil, exp, isnan, log, log2
from typing import Any

from benchmarks.lettering import fitted, height, shortened, spaced, width
from benchmarks.wording import RATIO
from warploom.errors import ConfigurationError
from warploom.runtime.contest import TIE

_INCH = 72  # points
_WIDE = 8.8 * _INCH  # points: what GitHub shows at its own size
_TITLE, _LABEL, _NUMBER = 10, 8.5, 7.5  # points: sizes of text
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
_OTHERS = tuple(("#777777", mark, "-") for mark in "*+P<>1234hd")
_MARKS = (  # of ratios; the first ones go before others
    *(1, 2, 0.5, 1.5, 3, 1.2, 0.9, 0.8, 1.1, 1.3, 0.7, 0.6, 4, 2.5, 6, 8, 0.25, 0.1, 10, 20, 50),
    *(100, 0.05, 0.01, 1000),
)


def require_matplotlib() -> None:
    """Raise ConfigurationError where it is missing, before anything of a picture is measured."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "pictures without matplotlib",
            rule="it is an optional dependency",
            fix="pip install 'warploom[plot]'",
        ) from error


def figure(wide: float, high: float) -> Any:  # noqa: ANN401 (matplotlib is optional)
    """An empty picture of that many points."""
    import matplotlib
    from matplotlib.figure import Figure

    # The same figures give the same bytes: no random ids. Text stays text, to be searched and read,
    # and a dollar in a name is no formula.
    matplotlib.rcParams.update(
        {"svg.hashsalt": "warploom", "svg.fonttype": "none", "text.parse_math": False}
    )
    return Figure(figsize=(wide / _INCH, high / _INCH), layout="constrained", facecolor="white")


def _titled(picture: Any, title: str, below: str = "") -> float:  # noqa: ANN401
    """Write the title, and a line below it; return the height that they take, in points."""
    room = picture.get_figwidth() * _INCH - 16
    text = fitted(title, room, _TITLE, lines=2)
    if below:
        text += f"\n{fitted(below, room, _TITLE)}"
    picture.suptitle(text, fontsize=_TITLE)
    return height(_TITLE, text.count("\n") + 1)


# ---- Bars ----------------------------------------------------------------------------------------


def bars(means: Mapping[str, float], title: str) -> Any:  # noqa: ANN401
    """A mean ratio of each name, as a bar that begins at 1."""
    names = [shortened(name, _WIDE / 2, _LABEL) for name in means]
    picture = figure(0.75 * _WIDE, 1)
    above = _titled(picture, title, _FASTER)
    picture.set_figheight((above + 17 * len(names) + 30) / _INCH)
    axes = picture.subplots()
    places = range(len(names))
    colours = [_VERDICTS["won" if mean >= 1 else "lost"][0] for mean in means.values()]
    axes.barh(places, [mean - 1 for mean in means.values()], left=1, color=colours, height=0.7)
    for place, mean in zip(places, means.values(), strict=True):
        axes.annotate(
            f"{mean:.2f}",
            (max(mean, 1), place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=_NUMBER,
        )
    axes.axvline(1.0, color="0.4", linewidth=0.8)
    axes.set_yticks(places, names, fontsize=_LABEL)
    axes.invert_yaxis()
    axes.set_xlim(min(0.9, *means.values()), 1.1 * max(means.values()))
    axes.tick_params(axis="x", labelsize=_NUMBER)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return picture


# ---- Heat map ------------------------------------------------------------------------------------


def heat(
    ratios: Mapping[tuple[str, int], float],
    groups: Sequence[Sequence[int]],
    title: str,
    axis: tuple[str, str],
) -> Any:  # noqa: ANN401
    """Ratios by row and number on `axis`; the numbers of each group have columns of their own.

    Fields without a ratio are hatched.
    """
    rows = list(dict.fromkeys(row for row, _ in ratios))
    names = [shortened(row, _WIDE / 3, _LABEL) for row in rows]
    columns = sum(map(len, groups))
    texts = [f"{ratio:.2f}" for ratio in ratios.values()]
    field = max(25, 6 + max(width(text, _NUMBER) for text in texts))
    around = max(width(name, _LABEL) for name in names) + 62  # names, colours and their numbers
    wide = max(around + columns * field, 0.75 * _WIDE)
    room = (wide - around) / columns
    numbers = [str(number) for group in groups for number in group]
    longest = max(width(number, _LABEL) for number in numbers)
    upright = longest + 3 > room
    high = 20 * len(rows) + (longest if upright else height(_LABEL)) + height(_LABEL) + 30
    picture = figure(wide, high)
    above = _titled(picture, title, _FASTER)
    picture.set_figheight((high + above) / _INCH)
    panels = picture.subplots(
        1, len(groups), sharey=True, squeeze=False, width_ratios=[len(g) for g in groups]
    )[0]
    limit = max(0.01, *(abs(log(ratio)) for ratio in ratios.values()))
    for axes, group in zip(panels, groups, strict=True):
        image = _map(axes, [[ratios.get((row, n)) for n in group] for row in rows], limit)
        axes.set_xticks(range(len(group)), [str(n) for n in group], fontsize=_LABEL)
        axes.tick_params(axis="x", labelrotation=90 if upright else 0)
        told = axis[1] if group is groups[0] else f"{axis[0]}, not powers of 2"
        axes.set_xlabel(fitted(told, max(0.85 * room * len(group), 40), _LABEL), fontsize=_LABEL)
        axes.set_yticks(range(len(rows)), names, fontsize=_LABEL)
        axes.tick_params(length=0)
    bar = picture.colorbar(image, ax=panels, pad=0.01, aspect=30)
    marks = _marks(-limit, limit, 20 * len(rows))
    bar.set_ticks([log(mark) for mark in marks], labels=[f"{mark:g}" for mark in marks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=_NUMBER)
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
            axes.text(x, y, text, ha="center", va="center", fontsize=_NUMBER, color=colour)
    return image


def _marks(low: float, high: float, room: float) -> list[float]:
    """The ratios to mark on a scale of logarithms from `low` to `high`, `room` points long."""
    found = [mark for mark in _MARKS if low - 1e-9 <= log(mark) <= high + 1e-9]
    places = [(log(mark) - low) / (high - low) * room for mark in found]
    return sorted(found[index] for index in spaced(places, [height(_LABEL)] * len(found)))


# ---- Sorted ratios -------------------------------------------------------------------------------


def ranked(
    panels: Mapping[str, Sequence[tuple[float, str]]], counts: Mapping[str, str], title: str
) -> Any:  # noqa: ANN401
    """Every (ratio, verdict) of each panel, sorted, with `counts` in words.

    Panels of one row have one scale.
    """
    columns = min(3, len(panels))
    rows = ceil(len(panels) / columns)
    wide = max(_WIDE / 3 * columns, _WIDE / 2)
    room = (wide - 34) / columns - 8  # of a panel, beside the numbers of the first one's scale
    names = [fitted(name, room, _LABEL, lines=2) for name in panels]
    told = [fitted(counts[name], room, _LABEL, lines=2) for name in panels]
    words = sum(
        height(_LABEL, 2 + max(text.count("\n") for text in texts[row : row + columns]))
        for texts in (names, told)
        for row in range(0, len(panels), columns)
    )
    picture = figure(wide, 1)
    above = _titled(picture, title, _FASTER)
    picture.set_figheight((above + words + 105 * rows + 40) / _INCH)
    grid = picture.subplots(rows, columns, sharey="row", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, cells, name, count in zip(grid.flat, panels.values(), names, told, strict=False):
        handles = _curve(axes, sorted(cells))
        axes.set_title(name, fontsize=_LABEL)
        axes.set(xticks=[], yscale="log")
        axes.set_xlabel(count, fontsize=_LABEL)
    values = list(panels.values())
    for first, axes in zip(range(0, len(values), columns), grid[:, 0], strict=True):
        row = values[first : first + columns]
        _scale(axes, [ratio for cells in row for ratio, _ in cells])
    legend = ["won", f"tied, within {TIE:.0%}", "lost"]
    picture.legend(handles, legend, loc="outside lower center", ncols=3, fontsize=_LABEL)
    return picture


def _scale(axes: Any, ratios: Sequence[float]) -> None:  # noqa: ANN401
    """A scale that has 1 in it, and ends a little beyond these ratios."""
    low, high = min(0.97 * min(ratios), 0.95), max(1.03 * max(ratios), 1.05)
    marks = _marks(log(low), log(high), 95)
    axes.minorticks_off()
    axes.set_ylim(low, high)
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks], fontsize=_NUMBER)


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
    rows, columns = (list(dict.fromkeys(key[place] for key in panels)) for place in (0, 1))
    wide = max(_WIDE / 3 * len(columns), _WIDE / 2)
    room = (wide - 56) / len(columns) - 10  # of a panel
    titles = {
        (row, column): fitted(f"{column}, {row}", room, _LABEL, lines=2)
        for row, column in product(rows, columns)
    }
    names = [name for lines in panels.values() for name in lines]
    styles = _styles(peers, names)
    names = sorted(dict.fromkeys(names), key=[*styles].index)
    called = [shortened(name, wide / 2, _LABEL) for name in names]
    entries = [width(name, _LABEL) + 54 for name in called]  # with their strokes
    beside = len(names) if sum(entries) <= wide - 20 else max(1, int((wide - 20) // max(entries)))
    lines_below = ceil(len(names) / beside)
    picture = figure(wide, 1)
    above = _titled(picture, title)
    words = height(_LABEL, 2) * len(rows) + height(_LABEL, lines_below + 2)
    picture.set_figheight((above + words + 140 * len(rows) + 40) / _INCH)
    grid = picture.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    every = sorted({n for lines in panels.values() for points in lines.values() for n, _ in points})
    for (y, row), (x, column) in product(enumerate(rows), enumerate(columns)):
        axes = grid[y][x]
        for name, points in panels.get((row, column), {}).items():
            handles[name] = _line(axes, points, styles[name], heavy=name == "Warploom")
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        ticks = _ticks(every, room - 20)
        axes.set_xticks(ticks, [str(number) for number in ticks], fontsize=_NUMBER)
        axes.set_title(titles[row, column], fontsize=_LABEL)
        axes.tick_params(labelsize=_NUMBER)
        axes.grid(color="0.9")
    grid[0][0].set_ylim(bottom=0)
    for axes in grid[-1]:
        axes.set_xlabel(fitted(axis, room, _LABEL), fontsize=_LABEL)
    picture.supylabel("TFLOP/s, higher is better", fontsize=_LABEL)
    picture.legend(
        [handles[name] for name in names],
        called,
        loc="outside lower center",
        ncols=beside,
        fontsize=_LABEL,
        handlelength=3.5,
    )
    return picture


def _styles(peers: Sequence[str], names: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """The colour, mark and stroke of each contender; a family's own peers have theirs always."""
    styles = {"Warploom": _OURS, **dict(zip(peers, _PEERS, strict=False))}
    others = [name for name in dict.fromkeys(names) if name not in styles]
    return styles | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}


def _line(
    axes: Any,  # noqa: ANN401
    points: Sequence[tuple[int, float]],
    style: tuple[str, str, str],
    *,
    heavy: bool,
) -> Any:  # noqa: ANN401
    colour, mark, stroke = style
    (line,) = axes.plot(
        *zip(*points, strict=True),
        marker=mark,
        linestyle=stroke,
        color=colour,
        markersize=4,
        linewidth=2.2 if heavy else 1.3,
        zorder=3 if heavy else 2,
    )
    return line


def _ticks(numbers: Sequence[int], room: float) -> list[int]:
    """Those of the numbers that have room for their names on a scale of logarithms."""
    first, span = log2(numbers[0]), log2(numbers[-1]) - log2(numbers[0]) or 1.0
    places = [(log2(number) - first) / span * room for number in numbers]
    kept = spaced(places, [width(str(number), _NUMBER) + 5 for number in numbers])
    return [numbers[index] for index in kept]
