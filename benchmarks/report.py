"""`python -m benchmarks.report --write docs/benchmarks.md`: every cell beside its peers.

Drawn from results/*.json and from nothing else, with the pictures of each result beside the page,
in pictures/. Needs matplotlib, unless the page is only printed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from benchmarks import tables
from benchmarks.absences import absences
from benchmarks.families import CellJson, Family, Group, families, group_of
from benchmarks.pictures import Picture, compared, means, of_section, overview, where
from benchmarks.protocol import read
from benchmarks.wording import (
    DocumentJson,
    beside,
    by_kind,
    kind_name,
    losses,
    of_grid,
    order,
    place,
    sections,
)
from warploom.atomic_file import replace_file
from warploom.generator.markdown import insert, table

RESULTS = Path(__file__).parent / "results"
MARKERS, SETS = "benchmarks", "sets"
OVERVIEW, MEANS = "every_cell", "means"
NOTHING = "Nothing has been measured yet."


def documents(folder: Path = RESULTS) -> dict[str, DocumentJson]:
    """Every result by the stem of its file, in the order of the page."""
    found = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: order(item[1]["cells"][0])))


def grids(listed: Mapping[str, DocumentJson]) -> list[DocumentJson]:
    """Of these what all peers were measured in."""
    return [document for document in listed.values() if of_grid(document["cells"][0])]


def rows(listed: Mapping[str, DocumentJson]) -> dict[str, list[CellJson]]:
    """The cells of each row of the README's table, as their families name them."""
    every = (cell for document in listed.values() for cell in document["cells"])
    return by_kind((cell for cell in every if group_of(cell).row), _row)


def _row(cell: CellJson) -> str:
    return group_of(cell).row.format(kind=kind_name(cell), **cell["problem"])


def summary_picture(listed: Mapping[str, DocumentJson]) -> Picture:
    """The bars of the README."""
    return means(MEANS, rows(listed), where(grids(listed)))


def pictures(listed: Mapping[str, DocumentJson]) -> list[Picture]:
    """Every picture of the page, those of all cells first."""
    found = [
        picture
        for stem, document in listed.items()
        for title in sections(document)
        for picture in of_section(stem, title, document)
    ]
    every = overview(OVERVIEW, grids(listed)) if grids(listed) else None
    return [summary_picture(listed), every, *found] if every else found


def draw(folder: Path = RESULTS) -> str:
    """Return the markdown of every result in `folder`."""
    listed = documents(folder)
    every = overview(OVERVIEW, grids(listed)) if grids(listed) else None
    parts = [_every([summary_picture(listed), every], grids(listed))] if every else []
    titles = [title for document in listed.values() for title in sections(document)]
    if len(titles) > 1:
        parts.append("\n".join(f"- [{title}](#{anchor(title)})" for title in titles))
    for stem, document in listed.items():
        parts += [_section(stem, title, document) for title in sections(document)]
    return "\n\n".join(parts) or NOTHING


def sets() -> str:
    """The table of sets of cases: what `--cells` takes, and which are measured without it."""
    rows = [
        (f"`{name}`", f"`{word}`", "yes" if word in one.grid else "", _about(one, group))
        for name, one in families().items()
        for word, group in one.groups.items()
        if group.cases
    ]
    return table(["family", "`--cells`", "without `--cells`", "cases"], rows)


def _about(one: Family, group: Group) -> str:
    """The title of a set for all of its types, and what it is about."""
    kind = next(iter(one.kinds.values())).partition(",")[0]
    return ", ".join(filter(None, [group.title.format(kind=kind), group.about]))


def anchor(heading: str) -> str:
    """What links to a heading name."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def image(picture: Picture, folder: str = "pictures") -> str:
    """The markdown that shows a picture."""
    return f"![{picture.alt}]({folder}/{picture.stem}.svg)"


def _every(shown: Sequence[Picture], documents: Sequence[DocumentJson]) -> str:
    """The section of all cells: their pictures, and the sums of each kind."""
    kinds = compared(documents)
    told = f"Measured on {where(documents)}; each mark of the second picture is a case."
    return "\n\n".join(
        ["## Every case", told, *map(image, shown), tables.totals("operation and dtype", kinds)]
    )


def _section(stem: str, title: str, document: DocumentJson) -> str:
    cells = sections(document)[title]
    told = [f"{place(document)}. Drawn from `{stem}.json`."]
    if not group_of(cells[0]).listed and (others := beside(cells)):
        told.append(f"Compared with {others}.")
    if absent := absences(cells):
        told.append(f"Absent: {absent}.")
    lost = "\n".join(f"- {line}" for line in losses(cells))
    parts = [
        f"## {title}",
        "\n".join(told),
        *(part for one in of_section(stem, title, document) for part in (image(one), one.below)),
        f"Lost, with fastest baseline / Warploom:\n\n{lost}" if lost and of_grid(cells[0]) else "",
        tables.of_section(cells),
    ]
    return "\n\n".join(filter(None, parts))


def renewed(page: str) -> str:
    """The page with what is drawn from results, and its sets of cases, as they should be."""
    return insert(insert(page, MARKERS, draw()), SETS, sets())


@click.command()
@click.option("--write", "path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(path: Path | None) -> None:
    """Draw the report of every result, between the markers of a page or to the terminal."""
    if path is None:
        click.echo(draw())
        return
    page = renewed(path.read_text())  # or nothing is changed
    folder = path.parent / "pictures"
    kept = {picture.save(folder) for picture in pictures(documents())}
    for stale in set(folder.glob("*.svg")) - kept:
        stale.unlink()
    replace_file(path, page)


if __name__ == "__main__":
    main()
