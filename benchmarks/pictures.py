"""`python -m benchmarks.pictures --out DIR FILE...`: the pictures of results, as SVG.

Of each family a heat map of ratios or rates along its axis, and of everything the sorted ratios
of each kind. They are drawn from JSON and from nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import click

from benchmarks import lettering, plots
from benchmarks.families import CellJson, family_of, group_of
from benchmarks.protocol import ratio_of, read, summary
from benchmarks.wording import (
    RATIO,
    DocumentJson,
    by_kind,
    cases,
    kind_name,
    kind_order,
    peer,
    point,
    right,
    sections,
    size,
    subject,
    verdicts,
)
from warploom.atomic_file import replacing

_FEWEST = 6  # cells that are worth a picture


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture to be drawn: its file's stem, what it shows in a sentence, and the figures in it.

    `below` is what a page says of it beneath: what is missing from it.
    """

    stem: str
    alt: str
    data: Any  # as JSON has it
    paint: Callable[[], Any]
    below: str = ""

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of what is drawn: the file has it, so that a stale one shows."""
        return hashlib.sha256(json.dumps(self.data).encode()).hexdigest()

    def drawn(self) -> Any:  # noqa: ANN401 (matplotlib is optional)
        """Draw it; raise PictureError where a text of it could not be read."""
        plots.require_matplotlib()
        figure = self.paint()
        lettering.check(figure)
        return figure

    def save(self, folder: Path) -> Path:
        """Draw it into `folder`; return the file."""
        path = folder / f"{self.stem}.svg"
        about = {"Date": None, "Title": self.alt, "Identifier": self.digest}
        if self.below:
            about["Description"] = self.below
        drawn = self.drawn()
        with replacing(path) as written:
            drawn.savefig(written, format="svg", metadata=about)
        return path


def of_section(stem: str, title: str, document: DocumentJson) -> list[Picture]:
    """The pictures that a section of a document has enough cells for: a heat map, or rates."""
    cells = sections(document)[title]
    problem = cells[0]["problem"]
    if group_of(cells[0]).listed:
        return []
    kind = "_".join(problem[key] for key in ("type", "pass") if key in problem)
    stem = stem if kind in stem else f"{stem}_{kind}"
    panels = any(family_of(cell).panel(cell["problem"]) for cell in cells)
    found = (_rates if panels else _heat)(stem, title, document, cells)
    return [found] if found else []


def overview(stem: str, documents: Sequence[DocumentJson]) -> Picture | None:
    """Every cell of these documents, sorted; None of too few."""
    kinds = compared(documents)
    panels = {
        kind: [(ratio, cell["verdict"]) for cell in cells if (ratio := ratio_of(cell))]
        for kind, cells in kinds.items()
    }
    panels = {kind: ratios for kind, ratios in panels.items() if ratios}
    count = sum(map(len, panels.values()))
    if count < _FEWEST:
        return None
    title = f"Warploom and the fastest baseline in {count} cases, {_gpus(documents)}"
    counts = {kind: verdicts(kinds[kind]) for kind in panels}
    alt = (
        f"{RATIO} in {count} benchmark cases on {where(documents)}, "
        f"sorted, in {len(panels)} panels, one for each operation and dtype."
    )
    paint = partial(plots.ranked, panels, counts, title)
    return Picture(stem, alt, [title, panels, counts], paint)


def means(stem: str, rows: Mapping[str, Sequence[CellJson]], place: str) -> Picture:
    """A bar for each row of the README's table: the geometric mean of its ratios."""
    found = {name: summary(cells)["geometric_mean"] for name, cells in rows.items()}
    found = {name: mean for name, mean in found.items() if mean}
    title = f"Geometric means on {place}"
    alt = f"A bar for each of {len(found)} operations: the geometric mean of {RATIO} on {place}."
    return Picture(stem, alt, [title, found], partial(plots.bars, found, title))


def compared(documents: Sequence[DocumentJson]) -> dict[str, list[CellJson]]:
    """The cells of these documents whose ratios say something, by their kind."""
    cells = (cell for document in documents for cell in document["cells"])
    every = (cell for cell in cells if not group_of(cell).listed)
    return by_kind(sorted(every, key=kind_order), kind_name)


def draw(name: str, document: DocumentJson, folder: Path) -> list[Path]:
    """Draw every picture of a document into `folder`; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    sorted_ratios = overview(f"{name}_sorted", [document])
    found = [p for title in sections(document) for p in of_section(name, title, document)]
    found += [sorted_ratios] if sorted_ratios else []
    return [picture.save(folder) for picture in found]


def where(documents: Sequence[DocumentJson]) -> str:
    """The GPUs on which documents were measured, and from when to when."""
    machines = [document["machine"] for document in documents]
    gpus = dict.fromkeys(machine.get("gpu") or "no GPU" for machine in machines)
    days = sorted({machine["date"] for machine in machines})
    return f"{', '.join(gpus)}, {' to '.join(dict.fromkeys([days[0], days[-1]]))}"


def _gpus(documents: Sequence[DocumentJson]) -> str:
    """The GPUs as titles name them."""
    gpus = (document["machine"].get("gpu") or "no GPU" for document in documents)
    return ", ".join(dict.fromkeys(gpu.removeprefix("NVIDIA ") for gpu in gpus))


def _heat(
    stem: str, what: str, document: DocumentJson, cells: Sequence[CellJson]
) -> Picture | None:
    """Ratios by subject and point, where they fill most of a grid of several rows and columns."""
    ordered = sorted(cells, key=size)
    found = {(subject(cell), point(cell)): r for cell in ordered if (r := ratio_of(cell))}
    rows = list(dict.fromkeys(subject for subject, _ in found))
    every = sorted(set(map(point, cells)))
    filled = 2 * len(found) > len(rows) * len(every)
    if len(found) < _FEWEST or min(len(rows), len(every)) < 2 or not filled:
        return None
    even = [m for m in every if m & (m - 1) == 0]
    groups = [group for group in (even, [m for m in every if m not in even]) if group]
    title = f"{what}, {_gpus([document])}"
    worst, best = min(found.values()), max(found.values())
    axis = family_of(cells[0]).axis
    alt = (
        f"Heat map of {RATIO} on {where([document])}: {what}, from {worst:.2f} to {best:.2f} "
        f"at {len(every)} values of {axis[0]}."
    )
    data = [title, groups, [[*key, ratio] for key, ratio in found.items()]]
    paint = partial(plots.heat, found, groups, title, axis)
    measured = {(subject(cell), point(cell)) for cell in cells}
    fields = list(product(rows, every))
    told = {
        "not measured": sum(field not in measured for field in fields),
        "without a baseline": sum(field in measured and field not in found for field in fields),
    }
    hatched = ", ".join(f"{cases(count)} {why}" for why, count in told.items() if count)
    below = f"Hatched: {hatched}." if hatched else ""
    return Picture(f"{stem}_layers", alt, data, paint, below)


def _rates(
    stem: str, what: str, document: DocumentJson, cells: Sequence[CellJson]
) -> Picture | None:
    """TFLOP/s over the axis, a panel for each row and column that the family has cells in."""
    panels: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    family = family_of(cells[0])
    plain = [cell for cell in cells if family.panel(cell["problem"])]
    for cell in sorted(plain, key=size):
        panel, work = family.panel(cell["problem"]), family.flops(cell["problem"]) or 0.0
        for entry in filter(right, cell["entries"]):
            lines = panels.setdefault(panel or ("", ""), {}).setdefault(
                peer(entry["contender"], family), []
            )
            lines.append((point(cell), work / entry["seconds"] * 1e-12))
    if len(plain) < _FEWEST or len(panels) < 2:
        return None
    title = f"{what}, {_gpus([document])}{family.drawn}"
    axis, words = family.axis
    alt = (
        f"TFLOP/s over {axis} on {where([document])}: {what}, in {len(panels)} panels, "
        f"with a line for each of {', '.join(_lines(panels))}."
    )
    data = [title, [[*place, lines] for place, lines in panels.items()]]
    names = [peer(name, family) for name in family.peers.values()]
    paint = partial(plots.rates, panels, names, title, words)
    return Picture(f"{stem}_rates", alt, data, paint, _unmeasured(panels, axis))


def _unmeasured(panels: Mapping[tuple[str, str], Mapping[str, Any]], axis: str) -> str:
    """Which points a panel has no contender at, though others have some there."""
    measured = {
        f"{column}, {row}": {number for points in lines.values() for number, _ in points}
        for (row, column), lines in panels.items()
    }
    every = sorted(set().union(*measured.values()))
    lacking = {
        panel: ", ".join(str(number) for number in every if number not in numbers)
        for panel, numbers in measured.items()
    }
    told = "; ".join(f"{panel}, {axis} {numbers}" for panel, numbers in lacking.items() if numbers)
    return f"Not measured: {told}." if told else ""


def _lines(panels: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for lines in panels.values() for name in lines))


_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command()
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
def main(files: Sequence[Path], out: Path) -> None:
    """Draw the pictures of documents of results."""
    for file in files:
        for path in draw(file.stem, read(file), out):
            click.echo(str(path))


if __name__ == "__main__":
    main()
