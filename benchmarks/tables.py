"""The tables of documents: verdicts by type, and every cell beside its peers.

Cells are taken as JSON has them (see `protocol`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.cells import layers
from benchmarks.protocol import summary
from benchmarks.wording import (
    RATIO,
    CellJson,
    by_kind,
    is_product,
    measured_peers,
    peer,
    right,
    size,
    subject,
)
from warploom.generator.markdown import table

_COUNTS = ("cells", "won", "tied", "lost", "absent", "wrong")
LISTED = ("gemm_compile", "gemm_fused", "gemm_host", "gemm_operations")  # whose ratios say little


def of_section(benchmark: str, cells: Sequence[CellJson]) -> str:
    """Every table of a section."""
    if benchmark == "gemm_compile":
        return _compilations(cells)
    if benchmark in LISTED:
        return _entries(cells)
    if is_product(cells[0]):
        return f"{totals('type', by_kind(cells))}\n\n{every_cell(cells)}"
    kinds = by_kind(sorted(cells, key=size), _heads)
    if len(kinds) > 1:
        kinds["all"] = list(cells)
    return f"{totals('cells of', kinds)}\n\n{every_cell(cells)}"


def _heads(cell: CellJson) -> str:
    problem = cell["problem"]
    if problem["lengths"]:
        return "packed sequences"
    shared = ", grouped queries" if problem["heads"] != problem["kv_heads"] else ""
    window = "" if problem["window"] is None else ", window"
    return f"head dimension {problem['dim']}{window}{shared}"


def totals(what: str, kinds: Mapping[str, Sequence[CellJson]]) -> str:
    """A line a kind: the geometric mean of its ratios, the least and the most, and its verdicts."""
    rows = []
    for kind, cells in kinds.items():
        told = summary(cells)
        rows.append((kind, *figures(cells), *(str(told[count]) for count in _COUNTS)))
    return table([what, RATIO, "least", "most", *_COUNTS], rows, numbers=True)


def figures(cells: Sequence[CellJson]) -> tuple[str, str, str]:
    """The geometric mean of the ratios, the least and the most."""
    ratios = [cell["ratio"] for cell in cells if cell["ratio"]]
    if not ratios:
        return "-", "-", "-"
    mean, least, most = summary(cells)["geometric_mean"], min(ratios), max(ratios)
    return f"{mean:.3f}", f"{least:.3f}", f"{most:.3f}"


def every_cell(cells: Sequence[CellJson]) -> str:
    """Times in microseconds of all that were measured somewhere; who chose the kernel, if known.

    Rows are sorted by size; `-` is a peer that was not measured there.
    """
    peers = list(measured_peers(cells))
    decided = any("decision" in cell["problem"] for cell in cells)
    rows = []
    for cell in sorted(cells, key=size):
        found = {entry["contender"]: entry for entry in cell["entries"]}
        rows.append(
            (
                _label(cell),
                _floor(cell),
                *(_microseconds(found.get(name)) for name in ("warploom", *peers)),
                _rate(cell),
                "-" if cell["ratio"] is None else f"{cell['ratio']:.3f}",
                cell["verdict"] + (", noisy" if cell["problem"].get("noisy") else ""),
                *((_decision(cell),) if decided else ()),
            )
        )
    names = [f"{peer(name)} us" for name in ("warploom", *peers)]
    lead = ["cell", "floor us", *names, "Warploom TFLOP/s", RATIO, "verdict"]
    return table([*lead, *(["kernel by"] if decided else [])], rows, numbers=True)


def _label(cell: CellJson) -> str:
    """The cell's own name, and that of the layer where it has one."""
    name, problem = str(cell["name"]), cell["problem"]
    known = is_product(cell) and (problem["n"], problem["k"]) in layers()
    named = name.endswith(f" {problem['m']}x{problem['n']}x{problem['k']}") if known else False
    return f"{name}, {subject(cell)}" if named and name.startswith(problem["type"]) else name


def _floor(cell: CellJson) -> str:
    floor = cell["floor"]
    return f"{floor['seconds'] * 1e6:.1f} ({floor['limit']})" if floor else "-"


def _microseconds(entry: CellJson | None) -> str:
    if entry is None or entry["seconds"] is None:
        return "-"
    return f"{entry['seconds'] * 1e6:.1f}" if right(entry) else "wrong"


def _rate(cell: CellJson) -> str:
    problem, seconds = cell["problem"], cell["entries"][0]["seconds"]
    flops = problem.get("flops")
    if is_product(cell):
        flops = 2 * problem["m"] * problem["n"] * problem["k"]
    return f"{flops / seconds * 1e-12:.0f}" if flops and seconds else "-"


def _decision(cell: CellJson) -> str:
    """The first words of what decided: a record, a near record, the model, the table."""
    reason = str(cell["problem"].get("decision", "-"))
    return reason.partition(",")[0].partition("(")[0].partition(":")[0].strip()


def _entries(cells: Sequence[CellJson]) -> str:
    rows = [
        (cell["name"], peer(entry["contender"]), _microseconds(entry))
        for cell in cells
        for entry in cell["entries"]
    ]
    return table(["what", "contender", "us"], rows)


def _compilations(cells: Sequence[CellJson]) -> str:
    seconds = [cell["entries"][0]["seconds"] for cell in cells]
    ratios = [1 / cell["ratio"] for cell in cells if cell["ratio"]]
    told = [("kernels", f"{len(seconds)}"), ("median s", f"{median(seconds):.2f}")]
    told.append(("slowest s", f"{max(seconds):.2f}"))
    if ratios:
        told.append(("slowest / baseline", f"{max(ratios):.2f}"))
    return table(["what", "value"], told, numbers=True)


def summaries(rows: Mapping[str, Sequence[CellJson]], beside: Mapping[str, str]) -> str:
    """The README's table: a line each of `rows`, and what it was compared with."""
    lines: list[tuple[str, ...]] = []
    for name, cells in rows.items():
        told: dict[str, Any] = summary(cells)
        mean, least, most = figures(cells)
        verdicts = " / ".join(str(told[word]) for word in ("won", "tied", "lost"))
        lines.append((name, mean, f"{least} to {most}", verdicts, beside[name]))
    return table(["", RATIO, "range", "won / tied / lost", "compared with"], lines)
