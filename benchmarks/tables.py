"""The tables of pages and of the terminal: verdicts by kind, and every cell beside its peers.

Cells are taken as JSON has them (see `protocol`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.families import CellJson, family_of, group_of
from benchmarks.protocol import ratio_of, summary
from benchmarks.wording import RATIO, beside, by_kind, measured_peers, peer, right, size
from warploom.generator.markdown import table

_COUNTS = ("cells", "won", "tied", "lost", "absent", "wrong")
Table = tuple[list[str], list[tuple[str, ...]]]  # columns and rows


def of_section(cells: Sequence[CellJson]) -> str:
    """Every table of a section."""
    if group_of(cells[0]).listed:
        return table(*of_cells(cells))
    kinds = by_kind(sorted(cells, key=size), _division)
    if len(kinds) > 1:
        kinds["all"] = list(cells)
    what, every = family_of(cells[0]).divided, table(*of_cells(cells), numbers=True)
    return f"{totals(what, kinds)}\n\n{every}"


def _division(cell: CellJson) -> str:
    return family_of(cell).division(cell["problem"])


def totals(what: str, kinds: Mapping[str, Sequence[CellJson]]) -> str:
    """A line a kind: the geometric mean of its ratios, the least and the most, and its verdicts."""
    rows = []
    for kind, cells in kinds.items():
        told = summary(cells)
        rows.append((kind, *figures(cells), *(str(told[count]) for count in _COUNTS)))
    return table([what, RATIO, "least", "most", "cases", *_COUNTS[1:]], rows, numbers=True)


def figures(cells: Sequence[CellJson]) -> tuple[str, str, str]:
    """The geometric mean of the ratios, the least and the most."""
    ratios = [ratio for cell in cells if (ratio := ratio_of(cell))]
    if not ratios:
        return "-", "-", "-"
    mean, least, most = summary(cells)["geometric_mean"], min(ratios), max(ratios)
    return f"{mean:.3f}", f"{least:.3f}", f"{most:.3f}"


def of_cells(cells: Sequence[CellJson]) -> Table:
    """Times in microseconds of all that were measured somewhere; who chose the kernel, if known.

    Rows are sorted by size; `-` is a peer that was not measured there. Of what is listed, a row
    for each contender.
    """
    if group_of(cells[0]).listed:
        rows = [_listed(cell, entry) for cell in cells for entry in cell["entries"]]
        floors = any(cell["floor"] for cell in cells)
        columns = ["what", "contender", "us", "us / first", *["floor / us"] * floors]
        return columns, [row[: len(columns)] for row in rows]
    names = ["warploom", *measured_peers(cells)]
    decided = ["kernel by"] if any("decision" in cell["problem"] for cell in cells) else []
    times = [f"{peer(name, family_of(cells[0]))} us" for name in names]
    further = list(dict.fromkeys(name for cell in cells for name in family_of(cell).further(cell)))
    rates = ["Warploom TFLOP/s", *further]
    columns = ["case", "floor us", *times, *rates, RATIO, "verdict", *decided]
    ordered = sorted(cells, key=size)
    return columns, [_row(cell, names, further)[: len(columns)] for cell in ordered]


def _listed(cell: CellJson, entry: CellJson) -> tuple[str, ...]:
    """A contender, its time by that of the case's first, and the floor by its time."""
    first, taken = cell["entries"][0], entry["seconds"]
    ratio, share = "-", "-"
    if right(entry) and taken:
        ratio = f"{taken / first['seconds']:.3f}" if right(first) else "-"
        share = f"{cell['floor']['seconds'] / taken:.2f}" if cell["floor"] else "-"
    called = peer(entry["contender"], family_of(cell))
    return str(cell["name"]), called, _microseconds(entry), ratio, share


def _row(cell: CellJson, names: Sequence[str], further: Sequence[str]) -> tuple[str, ...]:
    found = {entry["contender"]: entry for entry in cell["entries"]}
    own, ratio = family_of(cell).further(cell), ratio_of(cell)
    return (
        family_of(cell).label(cell),
        _floor(cell),
        *(_microseconds(found.get(name)) for name in names),
        _rate(cell),
        *(own.get(name, "-") for name in further),
        "-" if ratio is None else f"{ratio:.3f}",
        cell["verdict"] + (", noisy" if cell["problem"].get("noisy") else ""),
        _decision(cell),
    )


def _floor(cell: CellJson) -> str:
    floor = cell["floor"]
    return f"{floor['seconds'] * 1e6:.1f} ({floor['limit']})" if floor else "-"


def _microseconds(entry: CellJson | None) -> str:
    if entry is None or entry["seconds"] is None:
        return "-"
    return f"{entry['seconds'] * 1e6:.1f}" if right(entry) else "wrong"


def _rate(cell: CellJson) -> str:
    flops, ours = family_of(cell).flops(cell["problem"]), cell["entries"][0]
    return f"{flops / ours['seconds'] * 1e-12:.0f}" if flops and right(ours) else "-"


def _decision(cell: CellJson) -> str:
    """The first words of what decided: a record, a near record, the model, the table."""
    reason = str(cell["problem"].get("decision", "-"))
    return reason.partition(",")[0].partition("(")[0].partition(":")[0].strip()


def summaries(rows: Mapping[str, Sequence[CellJson]]) -> str:
    """The README's table: a line each of `rows`, and what it was compared with."""
    lines: list[tuple[str, ...]] = []
    for name, cells in rows.items():
        told = summary(cells)
        mean, least, most = figures(cells)
        verdicts = " / ".join(str(told[word]) for word in ("won", "tied", "lost"))
        lines.append((name, mean, f"{least} to {most}", verdicts, beside(cells)))
    return table(["", RATIO, "range", "won / tied / lost", "compared with"], lines)
