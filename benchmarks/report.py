"""`python -m benchmarks.report --write docs/benchmarks.md`: every cell beside its peers, in tables.

Drawn from results/*.json and from nothing else, with the pictures of each result beside the page,
in pictures/. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import pictures
from benchmarks.protocol import read
from benchmarks.tables import RESULTS, by_kind, totals
from warploom.generator.markdown import insert, table

MARKERS = "benchmarks"
TITLES = {  # of the documents that are drawn, in this order
    "bench_gemm": "Products beside their peers",
    "bench_attention": "Attention beside its peers",
    "gemm_llm": "Linear layers of language models beside cuBLAS",
    "gemm_squares": "Large products beside cuBLAS, not tuned",
    "attention_forward": "Attention forward, without FlashAttention-4 in the loop",
    "attention_window": "Attention forward in a causal window of 1024, and without one",
    "attention_packed": "Attention forward over sequences of varying length",
    "attention_backward": "Attention backward, by the table, without FlashAttention-4 in the loop",
    "attention_backward_deterministic": "Attention backward, bit-equal from run to run",
    "attention_backward_window": "Attention backward in a causal window of 1024, and without one",
    "attention_backward_packed": "Attention backward over sequences of varying length",
    "attention_autograd": "Attention, both passes through autograd, with the host's time",
}
_NOTHING = "Nothing has been measured yet."

CellJson = Mapping[str, Any]


def draw(folder: Path = RESULTS, drawn: Path | None = None) -> str:
    """Return the markdown of every result in `folder`; pictures go to the folder `drawn`."""
    documents = [(path, read(path)) for path in sorted(folder.glob("*.json"))]
    parts = []
    for name, title in TITLES.items():
        for path, document in documents:
            if document["benchmark"] == name:
                shown = pictures.draw(path.stem, document["cells"], drawn) if drawn else []
                parts.append(_part(title, path, document, shown))
    return "\n\n".join(parts) or _NOTHING


def _part(title: str, path: Path, document: Mapping[str, Any], shown: Sequence[Path]) -> str:
    cells, machine = document["cells"], document["machine"]
    driver = next((state["driver"] for state in document["states"] if "driver" in state), None)
    place = [machine.get("gpu"), driver and f"driver {driver}", f"torch {machine['torch']}"]
    told = ", ".join([*filter(None, place), machine["date"], f"`{path.name}`"])
    images = "\n".join(f"![{image.stem}](pictures/{image.name})" for image in shown)
    verdicts = totals("type", "fastest peer / Warploom", by_kind(cells, pictures.kind_of))
    parts = [f"## {title}", told, images, verdicts, _cells(cells)]
    return "\n\n".join(filter(None, parts))


def _cells(cells: Sequence[CellJson]) -> str:
    """Microseconds of every contender; a cell says how its kernel was chosen where it is known."""
    peers = sorted({entry["contender"] for cell in cells for entry in cell["entries"][1:]})
    decided = any("decision" in cell["problem"] for cell in cells)
    rows = []
    for cell in cells:
        found = {entry["contender"]: entry for entry in cell["entries"]}
        floor = cell["floor"]
        rows.append(
            (
                cell["name"],
                f"{floor['seconds'] * 1e6:.1f} ({floor['limit']})" if floor else "-",
                *(_microseconds(found.get(name)) for name in ("warploom", *peers)),
                "-" if cell["ratio"] is None else f"{cell['ratio']:.3f}",
                cell["verdict"] + (", noisy" if cell["problem"].get("noisy") else ""),
                *((_decision(cell),) if decided else ()),
            )
        )
    lead = ["us", "floor", "Warploom", *peers, "fastest peer / Warploom", "verdict"]
    return table([*lead, *(["kernel by"] if decided else [])], rows, numbers=True)


def _microseconds(entry: CellJson | None) -> str:
    if entry is None or entry["seconds"] is None:
        return "absent"
    return "wrong" if (entry["error_share"] or 0) > 1 else f"{entry['seconds'] * 1e6:.1f}"


def _decision(cell: CellJson) -> str:
    """The first words of what decided: a record, a near record, the model, the table."""
    reason = str(cell["problem"].get("decision", "-"))
    return reason.partition(",")[0].partition("(")[0].partition(":")[0].strip()


@click.command()
@click.option("--write", "path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(path: Path | None) -> None:
    """Draw the report of every result, between the markers of a page or to the terminal."""
    if path:
        text = draw(drawn=path.parent / "pictures")
        path.write_text(insert(path.read_text(), MARKERS, text))
    else:
        click.echo(draw())


if __name__ == "__main__":
    main()
