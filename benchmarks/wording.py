"""What kinds, cells and peers are called on pages and pictures, and their order.

Cells and documents are taken as JSON has them (see `protocol`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.families import CellJson, Family, families, family_of, group_of

DocumentJson = Mapping[str, Any]
RATIO = "fastest baseline / Warploom"


def kind_name(cell: CellJson) -> str:
    """What pages call a cell's kind: its family and type."""
    kinds = family_of(cell).kinds
    return kinds.get(cell["problem"].get("type", ""), family_of(cell).name)


def title(cell: CellJson) -> str:
    """The title of a cell's section."""
    return group_of(cell).title.format(kind=kind_name(cell))


def of_grid(cell: CellJson) -> bool:
    """True of what is measured with all its peers, and drawn together."""
    return cell["problem"]["cells"] in family_of(cell).grid


def by_kind(
    cells: Iterable[CellJson], kind: Callable[[CellJson], str] = kind_name
) -> dict[str, list[CellJson]]:
    """Cells by what `kind` calls them, in the order in which kinds first come."""
    found: dict[str, list[CellJson]] = {}
    for cell in cells:
        found.setdefault(kind(cell), []).append(cell)
    return found


def sections(document: DocumentJson) -> dict[str, list[CellJson]]:
    """The cells of a document by title."""
    return by_kind(document["cells"], title)


def place(document: DocumentJson) -> str:
    """The GPU, driver, torch and date of a document."""
    machine = document["machine"]
    driver = next((state["driver"] for state in document["states"] if "driver" in state), None)
    known = (machine.get("gpu"), driver and f"driver {driver}", f"torch {machine['torch']}")
    return ", ".join([*filter(None, known), machine["date"]])


# ---- Cells ---------------------------------------------------------------------------------------


def order(cell: CellJson) -> tuple[bool, int, int]:
    """Where a cell's section stands: the grid first, then by family."""
    family = family_of(cell)
    groups = list(family.groups)
    return (
        not of_grid(cell),
        list(families()).index(family.name),
        groups.index(cell["problem"]["cells"]),
    )


def kind_order(cell: CellJson) -> tuple[int, int]:
    """Where a cell's kind stands among all."""
    family = family_of(cell)
    kinds = list(family.kinds.values())
    return list(families()).index(family.name), [*kinds, kind_name(cell)].index(kind_name(cell))


def subject(cell: CellJson) -> str:
    """What a cell is of; `point` says where on it."""
    return family_of(cell).subject(cell["problem"])


def point(cell: CellJson) -> int:
    """Where on its family's axis a cell is."""
    return family_of(cell).at(cell["problem"])


def size(cell: CellJson) -> tuple[int, ...]:
    """What cells of a family are sorted by."""
    return family_of(cell).size(cell["problem"])


def verdicts(cells: Sequence[CellJson]) -> str:
    """Say how many cells were won, tied and lost."""
    count = Counter(cell["verdict"] for cell in cells)
    told = [f"{count[verdict]} {verdict}" for verdict in ("won", "tied", "lost")]
    if count["absent"]:
        told.append(f"{count['absent']} without a baseline")
    return f"{cases(len(cells))}: {', '.join(told)}"


def losses(cells: Iterable[CellJson], most: int | None = None) -> list[str]:
    """The cells that Warploom loses, a line a subject, those that lose most first."""
    lost = [cell for cell in cells if cell["verdict"] == "lost"]
    lines = []
    groups = sorted(by_kind(lost, subject).values(), key=lambda g: min(c["ratio"] for c in g))
    for group in groups[:most]:
        points = ", ".join(str(point(cell)) for cell in sorted(group, key=size))
        low, high = (f"{pick(cell['ratio'] for cell in group):.2f}" for pick in (min, max))
        figures = low if low == high else f"{low} to {high}"
        axis, _ = family_of(group[0]).axis
        lines.append(f"{subject(group[0])}, {axis} {points}: {figures}")
    if most is not None and groups[most:]:
        lines.append(f"{sum(map(len, groups[most:]))} more")
    return lines


# ---- Peers ---------------------------------------------------------------------------------------


def peer(name: str, family: Family) -> str:
    """What pages call a contender: "torch" is another function in each family."""
    own, *_ = name.partition(",")
    return family.called.get(name, "Warploom" + name[len(own) :] if own == "warploom" else name)


def right(entry: Mapping[str, Any]) -> bool:
    """True of a contender that was measured and answered rightly."""
    return entry["seconds"] is not None and (entry["error_share"] or 0) <= 1


def measured_peers(cells: Sequence[CellJson]) -> dict[str, int]:
    """In how many cells each peer was measured and right, the most often measured first."""
    count = Counter(
        entry["contender"] for cell in cells for entry in cell["entries"][1:] if right(entry)
    )
    return dict(sorted(count.items(), key=lambda pair: (-pair[1], pair[0].lower())))


def cases(count: int) -> str:
    """Say how many cases there are."""
    return f"{count} case" if count == 1 else f"{count} cases"


def share(count: int, of: int) -> str:
    """Say in how many of the cases something is."""
    return (
        f"{count} of {of} cases" if count < of else f"all {of} cases" if of > 1 else "the only case"
    )


def beside(cells: Sequence[CellJson]) -> str:
    """What cells were compared with: the peers, in how many cells where not in all.

    Other ways of ours are named where there is no peer, as a product with a gate behind it.
    """
    groups: dict[int, list[str]] = {}
    found = measured_peers(cells)
    others = {name: count for name, count in found.items() if not name.startswith("warploom")}
    for name, count in (others or found).items():
        groups.setdefault(count, []).append(peer(name, family_of(cells[0])))
    return "; ".join(
        ", ".join(names) + ("" if count == len(cells) else f" in {share(count, len(cells))}")
        for count, names in groups.items()
    )
