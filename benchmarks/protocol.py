"""How benchmarks are recorded: operands in turn, summaries of cells, and the JSON document.

What a cell is, and how its contenders are timed, the package itself says (runtime/contest.py). The
document is rewritten after every cell.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TypeVar

import torch

from warploom import line_json
from warploom.atomic_file import replace_file
from warploom.generator import json_file
from warploom.runtime.contest import Cell
from warploom.runtime.trial import buffer_sets
from warploom.tuning.bench import as_json

Operands = TypeVar("Operands")
SCHEMA = 1


def rotated(make: Callable[[], Operands], set_bytes: int, device: str) -> list[Operands]:
    """As many sets of operands as outlast the GPU's L2 cache when used in turn."""
    count = 1
    if device == "cuda":
        count = buffer_sets(set_bytes, torch.cuda.get_device_properties(0).L2_cache_size)
    return [make() for _ in range(count)]


# ---- The document --------------------------------------------------------------------------------


def summary(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Verdicts counted, the ratios' geometric mean and 5th percentile, of cells as JSON."""
    cells = list(cells)
    counts = Counter(cell["verdict"] for cell in cells)
    ratios = [ratio for cell in cells if (ratio := ratio_of(cell))]
    return {
        "cells": len(cells),
        **{verdict: counts[verdict] for verdict in ("won", "tied", "lost", "absent", "wrong")},
        "geometric_mean": geometric_mean(ratios) if ratios else None,
        "percentile_5": percentile(ratios, 5) if ratios else None,
    }


def ratio_of(cell: Mapping[str, Any]) -> float | None:
    """The ratio of a cell as JSON; None of a wrong result, whose time says nothing."""
    return None if cell["verdict"] == "wrong" else cell["ratio"]


def percentile(values: Sequence[float], share: float) -> float:
    """What `share` % of values are below, between two of them in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


class Record:
    """The document of one benchmark, on disk after every cell; `path` is replaced.

    `states` may grow: driver, clocks, power and temperature of GPUs at some moments.
    """

    def __init__(
        self,
        path: Path,
        benchmark: str,
        machine: Mapping[str, Any],
        states: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.path = path
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "benchmark": benchmark,
            "machine": dict(machine),
            "states": states,
            "cells": [],
        }
        self._places: list[int] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, cell: Cell, place: int | None = None) -> None:
        """Note a cell: the last one, or one whose place among all is known."""
        place = len(self._places) if place is None else place
        before = bisect(self._places, place)
        self._places.insert(before, place)
        self.document["cells"].insert(before, as_json(cell))
        self.write()

    def write(self) -> None:
        """Write the document as it stands."""
        replace_file(self.path, line_json.dumps(self.document))  # a run may be ended


def read(path: Path) -> dict[str, Any]:
    """Read a document; ValueError, with its path, for one of another schema or without cells."""
    try:
        document: dict[str, Any] = json_file.parse(json_file.content(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}: measure anew, or restore it") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path}: schema {schema}, not {SCHEMA}: measure anew")
    if not document.get("cells"):
        raise ValueError(f"{path}: no cells, as of a run that was stopped: measure anew")
    return document
