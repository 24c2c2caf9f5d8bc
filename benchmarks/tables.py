"""`python -m benchmarks.tables`: the README's tables, drawn from results/*.json.

Prints them, or with `--write FILE` puts them between FILE's two markers. Documents of one benchmark
are drawn together, in the order of their file names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.pictures import kind_of
from benchmarks.protocol import read, summary
from warploom.generator.markdown import insert, table

RESULTS = Path(__file__).parent / "results"
MARKERS = "measured"
_NOTHING = "Nothing has been measured yet."

CellJson = Mapping[str, Any]


def draw(folder: Path = RESULTS) -> str:
    """Return the markdown of every result in `folder`."""
    documents = [read(path) for path in sorted(folder.glob("*.json"))]
    parts = []
    for name, title, drawer in _DRAWERS:
        found = [document for document in documents if document["benchmark"] == name]
        if found:
            cells = [cell for document in found for cell in document["cells"]]
            parts.append(f"**{title}** ({_place(found[0])})\n\n{drawer(cells)}")
    return "\n\n".join(parts) or _NOTHING


def _place(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    driver = next((state["driver"] for state in document["states"] if "driver" in state), None)
    known = (machine.get("gpu"), driver and f"driver {driver}", f"torch {machine['torch']}")
    return ", ".join([*filter(None, known), machine["date"]])


def _microseconds(entry: Mapping[str, Any]) -> str:
    return "absent" if entry["seconds"] is None else f"{entry['seconds'] * 1e6:.1f}"


def _ratio(cell: CellJson) -> str:
    return "-" if cell["ratio"] is None else f"{cell['ratio']:.3f}"


def _products(cells: Sequence[CellJson]) -> str:
    columns = ["cell", "Warploom us", "TFLOP/s", "torch us", "torch / Warploom", "floor us"]
    rows = []
    for cell in cells:
        ours, peer = cell["entries"][:2]
        problem = cell["problem"]
        flops = 2 * problem["m"] * problem["n"] * problem["k"]
        rate = "-" if ours["seconds"] is None else f"{flops / ours['seconds'] * 1e-12:.0f}"
        floor = f"{cell['floor']['seconds'] * 1e6:.1f}"
        times = (_microseconds(ours), rate, _microseconds(peer), _ratio(cell), floor)
        rows.append((cell["name"], *times))
    return table(columns, rows, numbers=True)


def _summaries(cells: Sequence[CellJson], ratio: str = "torch / Warploom") -> str:
    return totals("type", ratio, by_kind(cells, kind_of))


def by_kind(
    cells: Sequence[CellJson], kind: Callable[[CellJson], str]
) -> dict[str, list[CellJson]]:
    """Cells by what `kind` calls them, in the order in which kinds first come."""
    found: dict[str, list[CellJson]] = {}
    for cell in cells:
        found.setdefault(kind(cell), []).append(cell)
    return found


def totals(what: str, ratio: str, kinds: Mapping[str, Sequence[CellJson]]) -> str:
    """A line a kind: the geometric mean of its ratios, the least and the most, and its verdicts."""
    rows = []
    for kind, cells in kinds.items():
        told = summary(cells)
        mean = told.pop("geometric_mean")
        ratios = [cell["ratio"] for cell in cells if cell["ratio"]]
        figures = [f"{x:.3f}" for x in (mean, min(ratios), max(ratios))] if ratios else "---"
        rows.append((kind, *figures, *map(str, told.values())))
    counts = ["cells", "won", "tied", "lost", "absent", "wrong"]
    return table([what, ratio, "least", "most", *counts], rows, numbers=True)


def _squares(cells: Sequence[CellJson]) -> str:
    return f"{_products(cells)}\n\n{_summaries(cells)}"


def _entries(cells: Sequence[CellJson]) -> str:
    rows = [
        (f"{cell['name']}: {entry['contender']}", _microseconds(entry))
        for cell in cells
        for entry in cell["entries"]
    ]
    return table(["what", "us"], rows, numbers=True)


def _compilations(cells: Sequence[CellJson]) -> str:
    seconds = [cell["entries"][0]["seconds"] for cell in cells]
    ratios = [1 / cell["ratio"] for cell in cells if cell["ratio"]]
    told = [("kernels", f"{len(seconds)}"), ("median s", f"{median(seconds):.2f}")]
    told.append(("slowest s", f"{max(seconds):.2f}"))
    if ratios:
        told.append(("slowest / baseline", f"{max(ratios):.2f}"))
    return table(["what", "value"], told, numbers=True)


def _attentions(cells: Sequence[CellJson]) -> str:
    """The ratio is to each cell's fastest peer."""
    kinds = by_kind(cells, _heads)
    if len(kinds) > 1:
        kinds["all"] = list(cells)
    return totals("heads", "best peer / Warploom", kinds)


def _passes(cells: Sequence[CellJson]) -> str:
    """As `_attentions`, each pass by itself."""
    kinds = by_kind(cells, lambda cell: f"{cell['problem']['pass']}, {_heads(cell)}")
    return totals("pass and heads", "fastest peer / Warploom", kinds)


def _heads(cell: CellJson) -> str:
    problem = cell["problem"]
    if problem["lengths"]:
        return "packed"
    if problem["heads"] != problem["kv_heads"]:
        return f"dimension {problem['dim']}, grouped queries"
    window = "" if problem["window"] is None else ", window"
    return f"dimension {problem['dim']}{window}"


_DRAWERS: tuple[tuple[str, str, Callable[[Sequence[CellJson]], str]], ...] = (
    ("gemm_squares", "Large products", _squares),
    (
        "bench_gemm",
        "Linear layers of language models: ten weights, M from 1 to 8192; bf16's large products",
        partial(_summaries, ratio="fastest peer / Warploom"),
    ),
    ("gemm_llm", "Linear layers of language models beside cuBLAS", _summaries),
    ("gemm_training", "Layouts, and a layer's three products", _products),
    ("gemm_operations", "Promoted sums, 8-bit outputs, batches, sums in place", _entries),
    ("gemm_fused", "Scale, bias, gelu and residual in the kernel, 4096x14336x4096", _entries),
    ("gemm_host", "Host time of a warm call, 256x256x256", _entries),
    ("bench_attention", "Attention, bf16, 16k tokens; grouped queries", _passes),
    ("attention_forward", "Attention forward, without FlashAttention-4 in the loop", _attentions),
    ("attention_window", "Attention in a causal window of 1024, and without one", _attentions),
    ("attention_packed", "Attention over sequences of varying length", _attentions),
    (
        "attention_backward",
        "Gradients of attention, by the table, without FlashAttention-4 in the loop",
        _attentions,
    ),
    (
        "attention_backward_deterministic",
        "Gradients of attention, bit-equal from run to run",
        _attentions,
    ),
    ("attention_backward_window", "Gradients in a causal window of 1024", _attentions),
    ("attention_backward_packed", "Gradients over sequences of varying length", _attentions),
    (
        "attention_autograd",
        "Attention and its gradients through autograd, with the host's time",
        _attentions,
    ),
    ("gemm_compile", "NVRTC's time for a shipped kernel, in a fresh process", _compilations),
)


@click.command()
@click.option("--write", "path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(path: Path | None) -> None:
    """Draw the tables of every result."""
    if path:
        path.write_text(insert(path.read_text(), MARKERS, draw()))
    else:
        click.echo(draw())


if __name__ == "__main__":
    main()
