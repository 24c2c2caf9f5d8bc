"""How things are measured and recorded: contenders, cells, floors, verdicts and the JSON document.

Contenders of a cell take turns (warploom.runtime.measure); the first is ours, the second its peer,
and the cell's figure is their ratio. Whatever is missing or refuses a problem is recorded as absent
with the reason. Times are seconds. The document is rewritten after every cell.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from warploom.errors import ResultError, WarploomError
from warploom.generator.gpus import DEFAULT, GpuKind, kind
from warploom.runtime.measure import Call, Sampler, graph_sampler, interleave
from warploom.runtime.trial import uncollected

SCHEMA = 1
MISSING = 4  # the exit code where a contender that was asked for could not be measured
TIE = 0.02  # ratios this close to 1 are neither won nor lost


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time a problem can take, and which limit sets it."""

    seconds: float
    limit: str  # flops or bytes


@cache
def here() -> GpuKind:
    """The kind whose limits set floors: that of the GPU here, the default where there is none."""
    return kind(torch.cuda.get_device_name()) if torch.cuda.is_available() else DEFAULT


def gemm_floor(m: int, n: int, k: int, input_bits: int, output_bits: int) -> Floor:
    """The floor of D[m, n] = A[m, k] B[k, n], each matrix moved once."""
    flops = 2 * m * n * k / here().flops[input_bits]
    moved = gemm_bytes(m, n, k, input_bits, output_bits) / here().bytes_per_second
    return Floor(max(flops, moved), "flops" if flops > moved else "bytes")


def gemm_bytes(m: int, n: int, k: int, input_bits: int, output_bits: int) -> int:
    """The bytes of A, B and D together."""
    return ((m + n) * k * input_bits + m * n * output_bits) // 8


# ---- A cell --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to time: one call for each set of buffers.

    `error_share` is asked after the timing (see warploom.runtime.measure), `kernel` likewise.
    """

    name: str
    calls: Sequence[Call]
    error_share: Callable[[], float] | None = None
    kernel: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of a contender: its median and spread, or why it is absent."""

    contender: str
    seconds: float | None = None
    spread: float | None = None
    kernel: str | None = None
    error_share: float | None = None
    absent: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One problem with all its contenders: ours first, its peer second."""

    name: str
    problem: Mapping[str, Any]
    entries: tuple[Entry, ...]
    floor: Floor | None = None

    @property
    def ratio(self) -> float | None:
        """The peer's time over ours; None without both."""
        if len(self.entries) < 2:
            return None
        ours, peer = (entry.seconds for entry in self.entries[:2])
        return peer / ours if ours and peer else None

    @property
    def verdict(self) -> str:
        """The outcome: won, tied, lost, absent (no ratio), or wrong (ours fails its bound)."""
        if (self.entries[0].error_share or 0) > 1:
            return "wrong"
        ratio = self.ratio
        if ratio is None:
            return "absent"
        return "won" if ratio > 1 + TIE else "lost" if ratio < 1 - TIE else "tied"

    def as_json(self) -> dict[str, Any]:
        """The cell as it stands in the document."""
        return {**asdict(self), "ratio": self.ratio, "verdict": self.verdict}

    def __str__(self) -> str:
        """One line on how it went."""
        told = [
            f"{entry.contender} {entry.absent or f'{(entry.seconds or 0) * 1e6:.1f} us'}"
            for entry in self.entries
        ]
        ratio = "" if self.ratio is None else f" {self.ratio:.3f}"
        return f"{self.name}: {', '.join(told)}: {self.verdict}{ratio}"


def compete(
    name: str,
    problem: Mapping[str, Any],
    contenders: Sequence[Contender],
    floor: Floor | None = None,
    *,
    sampler: Callable[[Sequence[Call]], Sampler] = graph_sampler,
    rounds: int = 9,
) -> Cell:
    """Time `contenders` in turns, then check what they computed on the buffers that were timed."""
    samplers: dict[str, Sampler] = {}
    absent: dict[str, str] = {}
    with uncollected():
        for contender in contenders:
            try:
                samplers[contender.name] = sampler(contender.calls)
            except torch.AcceleratorError:  # the process can use its GPU no more
                raise
            except (RuntimeError, AttributeError, ValueError, WarploomError) as error:
                absent[contender.name] = (str(error) or type(error).__name__).splitlines()[0]
    timings = interleave(samplers, rounds=rounds)
    entries = tuple(
        Entry(contender.name, absent=absent[contender.name])
        if contender.name in absent
        else Entry(
            contender.name,
            seconds=timings[contender.name].median,
            spread=timings[contender.name].spread,
            kernel=contender.kernel() if contender.kernel else None,
            error_share=contender.error_share() if contender.error_share else None,
        )
        for contender in contenders
    )
    return Cell(name, problem, entries, floor)


# ---- The document --------------------------------------------------------------------------------


def summary(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Verdicts counted, and the geometric mean of the ratios, of cells as JSON."""
    cells = list(cells)
    counts = Counter(cell["verdict"] for cell in cells)
    logs = [log(cell["ratio"]) for cell in cells if cell["ratio"]]
    return {
        "cells": len(cells),
        **{verdict: counts[verdict] for verdict in ("won", "tied", "lost", "absent", "wrong")},
        "geometric_mean": exp(sum(logs) / len(logs)) if logs else None,
    }


def exit_code(cells: Sequence[Cell]) -> int:
    """3 where a result of Warploom's is wrong, else 4 where one is absent, else 0."""
    if any(cell.verdict == "wrong" for cell in cells):
        return ResultError.exit_code
    return MISSING if any(cell.entries[0].absent for cell in cells) else 0


class Record:
    """The document of one benchmark, on disk after every cell; `path` is replaced."""

    def __init__(self, path: Path, benchmark: str, machine: Mapping[str, Any]) -> None:
        self.path = path
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "benchmark": benchmark,
            "machine": dict(machine),
            "states": [],
            "cells": [],
        }
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, cell: Cell) -> None:
        """Note a cell."""
        self.document["cells"].append(cell.as_json())
        self._write()

    def state(self, state: Mapping[str, Any]) -> None:
        """Note the clocks, power and temperature of a moment."""
        self.document["states"].append(dict(state))
        self._write()

    def _write(self) -> None:
        self.path.write_text(json.dumps(self.document, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read a document; ValueError if it is of another schema."""
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {document.get('schema')}, not {SCHEMA}: measure anew")
    return document
