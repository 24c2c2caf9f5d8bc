"""What documents, kinds, cells and peers are called on pages and pictures, and their order.

Cells and documents are taken as JSON has them (see `protocol`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.cells import layers

CellJson = Mapping[str, Any]
DocumentJson = Mapping[str, Any]
RATIO = "fastest peer / Warploom"
KINDS = {  # of cells, as `kind_of` has them
    "bf16": "GEMM, bf16",
    "e4m3": "GEMM, e4m3, one scale per tensor",
    "e4m3_row_column": "GEMM, e4m3, a scale per row and column",
    "int8": "GEMM, int8",
    "bf16 forward": "Attention forward, bf16",
    "bf16 backward": "Attention backward, bf16",
}
TITLES = {  # of sections by benchmark, in the order of the page
    "bench_gemm": "{kind}, {products}",
    "bench_attention": "{kind}",
    "gemm_llm": "{kind}, {products}, compared with cuBLAS alone",
    "gemm_squares": "{kind}, large products, not tuned",
    "gemm_training": "{kind}, every layout, and the three products of training a layer",
    "gemm_operations": "GEMM, promoted sums, 8-bit results, batches, sums in place",
    "gemm_fused": "GEMM, bf16, with scale, bias, gelu and residual in the kernel",
    "gemm_host": "GEMM, bf16, host time of a warm call",
    "gemm_compile": "Compilation of a shipped kernel by NVRTC, in a fresh process",
    "attention_forward": "Attention forward, bf16, without FlashAttention-4",
    "attention_window": "Attention forward, bf16, in a causal window of 1024",
    "attention_packed": "Attention forward, bf16, packed sequences of varying length",
    "attention_backward": "Attention backward, bf16, without FlashAttention-4",
    "attention_backward_deterministic": "Attention backward, bf16, deterministic",
    "attention_backward_window": "Attention backward, bf16, in a causal window of 1024",
    "attention_backward_packed": "Attention backward, bf16, packed sequences of varying length",
    "attention_autograd": "Attention forward and backward, bf16, by autograd, host time included",
}
PEERS = {
    "warploom": "Warploom",
    "torch.mm": "torch.mm (cuBLAS)",
    "torch._scaled_mm": "torch._scaled_mm (cuBLAS)",
    "quack": "QuACK",
    "triton": "Triton",
    "warploom, in any order": "Warploom, not deterministic",
}
_ABSENT = (  # what a peer's own words mean
    ("No module named", "not installed in that run"),
    ("size(0) needs to be greater than 16", "it takes more than 16 rows"),
    ("one causal mask and one length only", "torch has no windows and no packed sequences"),
    ("torch has no deterministic one", "torch has no deterministic one"),
    ("Deterministic backward not supported for hdim 256", "not for head dimension 256"),
)


def kind_name(kind: str) -> str:
    """What pages call a kind."""
    return KINDS.get(kind, kind)


def kind_of(cell: CellJson) -> str:
    """What cells are grouped by: the type, and of attention the pass where a document has both."""
    problem = cell["problem"]
    return " ".join(str(problem[key]) for key in ("type", "pass") if key in problem)


def by_kind(
    cells: Iterable[CellJson], kind: Callable[[CellJson], str] = kind_of
) -> dict[str, list[CellJson]]:
    """Cells by what `kind` calls them, in the order in which kinds first come."""
    found: dict[str, list[CellJson]] = {}
    for cell in cells:
        found.setdefault(kind(cell), []).append(cell)
    return found


def sections(document: DocumentJson) -> dict[str, list[CellJson]]:
    """The cells of a document by title: a section for each type, and of attention each pass."""
    benchmark = str(document["benchmark"])
    title = TITLES.get(benchmark, benchmark)
    if "{kind}" not in title:
        return {title: list(document["cells"])}
    return {
        title.format(kind=kind_name(kind), products=_products(cells)): cells
        for kind, cells in by_kind(document["cells"]).items()
    }


def _products(cells: Sequence[CellJson]) -> str:
    weights = [(cell["problem"].get("n"), cell["problem"].get("k")) for cell in cells]
    known = all(weight in layers() for weight in weights)
    return "layers of language models" if known else "large products"


def fair(document: DocumentJson) -> dict[str, Any]:
    """The document without ratios to a peer that answers wrongly."""
    cells = [
        {**cell, "ratio": None, "verdict": "absent"}
        if cell["verdict"] != "wrong" and not all(map(right, cell["entries"][1:2]))
        else cell
        for cell in document["cells"]
    ]
    return {**document, "cells": cells}


def place(document: DocumentJson) -> str:
    """The GPU, driver, torch and date of a document."""
    machine = document["machine"]
    driver = next((state["driver"] for state in document["states"] if "driver" in state), None)
    known = (machine.get("gpu"), driver and f"driver {driver}", f"torch {machine['torch']}")
    return ", ".join([*filter(None, known), machine["date"]])


# ---- Cells ---------------------------------------------------------------------------------------


def is_product(cell: CellJson) -> bool:
    """True of a GEMM."""
    return set(cell["problem"]) >= {"m", "n", "k"}


def subject(cell: CellJson) -> str:
    """What a cell is of: the layer, or the head dimension and mask; `point` says where on it."""
    problem = cell["problem"]
    if is_product(cell):
        n, k = problem["n"], problem["k"]
        return layers().get((n, k), f"{n}x{k}")
    if problem["lengths"]:
        return f"head dimension {problem['dim']}, {len(problem['lengths'])} packed sequences"
    mask = "causal" if problem["causal"] else "no mask"
    if problem["window"] is not None:
        mask = f"window of {problem['window'] + 1}"
    shared = problem["heads"] != problem["kv_heads"]
    groups = f", {problem['heads']} query heads on {problem['kv_heads']}" if shared else ""
    return f"head dimension {problem['dim']}, {mask}{groups}"


def point(cell: CellJson) -> tuple[str, int]:
    """The axis along which a subject is measured, and where on it: ("M", 64), ("length", 512)."""
    problem = cell["problem"]
    return ("M", problem["m"]) if is_product(cell) else ("length", problem["seq"])


def size(cell: CellJson) -> tuple[int, ...]:
    """What cells are sorted by: products by layer, then M; attention by heads, mask and length."""
    problem = cell["problem"]
    if is_product(cell):
        known = list(layers())
        weight = (problem["n"], problem["k"])
        order = known.index(weight) if weight in known else len(known)
        return order, *weight, problem["m"]
    windowed = problem["window"] is not None
    shared = problem["heads"] != problem["kv_heads"]
    return shared, problem["dim"], windowed, problem["causal"], problem["seq"], problem["batch"]


def verdicts(cells: Sequence[CellJson]) -> str:
    """How many cells were won, tied and lost, in words."""
    count = Counter(cell["verdict"] for cell in cells)
    told = [f"{count[verdict]} {verdict}" for verdict in ("won", "tied", "lost")]
    if count["absent"]:
        told.append(f"{count['absent']} without a peer")
    return ", ".join([f"{len(cells)} cells", *told])


def losses(cells: Iterable[CellJson], most: int | None = None) -> list[str]:
    """The cells that Warploom loses, a line a subject, those that lose most first."""
    lost = [cell for cell in cells if cell["verdict"] == "lost"]
    lines = []
    groups = sorted(by_kind(lost, subject).values(), key=lambda g: min(c["ratio"] for c in g))
    for group in groups[:most]:
        ordered = sorted(group, key=size)
        points = ", ".join(str(point(cell)[1]) for cell in ordered)
        low, high = (f"{pick(cell['ratio'] for cell in group):.2f}" for pick in (min, max))
        figures = low if low == high else f"{low} to {high}"
        lines.append(f"{subject(group[0])}, {point(group[0])[0]} {points}: {figures}")
    if most is not None and groups[most:]:
        lines.append(f"{sum(map(len, groups[most:]))} more")
    return lines


# ---- Peers ---------------------------------------------------------------------------------------


def peer(name: str) -> str:
    """What a contender is called."""
    return PEERS.get(name, name)


def right(entry: Mapping[str, Any]) -> bool:
    """True of a contender that was measured and answered rightly."""
    return entry["seconds"] is not None and (entry["error_share"] or 0) <= 1


def measured_peers(cells: Sequence[CellJson]) -> dict[str, int]:
    """In how many cells each peer was measured and right, the most often measured first."""
    count = Counter(
        entry["contender"] for cell in cells for entry in cell["entries"][1:] if right(entry)
    )
    return dict(sorted(count.items(), key=lambda pair: (-pair[1], pair[0].lower())))


def beside(cells: Sequence[CellJson]) -> str:
    """What cells were compared with: the peers, in how many cells where not in all."""
    groups: dict[int, list[str]] = {}
    for name, count in measured_peers(cells).items():
        if not name.startswith("warploom"):
            groups.setdefault(count, []).append(peer(name))
    return "; ".join(
        ", ".join(names) + ("" if count == len(cells) else f" in {count} of {len(cells)} cells")
        for count, names in groups.items()
    )


def absences(cells: Sequence[CellJson]) -> str:
    """Which peers are missing in how many cells, and why; empty where none is."""
    found: Counter[tuple[str, str]] = Counter()
    for cell in cells:
        for entry in cell["entries"][1:]:
            if entry["absent"]:
                found[entry["contender"], _why(entry["absent"])] += 1
    return "; ".join(
        f"{peer(name)} in {count} of {len(cells)} cells ({why})"
        for (name, why), count in found.items()
    )


def _why(words: str) -> str:
    return next((meaning for part, meaning in _ABSENT if part in words), words)
