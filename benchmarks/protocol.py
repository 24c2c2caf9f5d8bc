"""How things are measured and recorded: contenders, cells, floors, verdicts and the JSON document.

Contenders of a cell take turns (warploom.runtime.measure); the first is ours, the second its
fastest peer, and the cell's figure is their ratio. Whatever is missing or refuses a problem is
recorded as absent with the reason. Times are seconds. The document is rewritten after every cell.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TypeVar

import torch

from warploom.atomic_file import replace_file
from warploom.errors import WarploomError
from warploom.generator.gpus import DEFAULT, GpuKind, kind
from warploom.printable import first_line
from warploom.runtime.measure import Call, Sampler, graph_sampler, interleave
from warploom.runtime.trial import buffer_sets, uncollected

Operands = TypeVar("Operands")
Sampling = Callable[[Sequence[Call]], Sampler]
SCHEMA = 1
TIE = 0.02  # ratios this close to 1 are neither won nor lost


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time a problem can take, and which limit sets it."""

    seconds: float
    limit: str  # flops or bytes

    @classmethod
    def of(cls, flops: float, moved: float = 0.0, bits: int = 16) -> Floor:
        """The floor of so many operations on inputs of so many bits, and bytes moved once."""
        products, memory = flops / here().flops[bits], moved / here().bytes_per_second
        return cls(products, "flops") if products > memory else cls(memory, "bytes")


@cache
def here() -> GpuKind:
    """The kind whose limits set floors: that of the GPU here, the default where there is none."""
    return kind(torch.cuda.get_device_name()) if torch.cuda.is_available() else DEFAULT


def rotated(make: Callable[[], Operands], set_bytes: int, device: str) -> list[Operands]:
    """As many sets of operands as outlast the GPU's L2 cache when used in turn."""
    count = 1
    if device == "cuda":
        count = buffer_sets(set_bytes, torch.cuda.get_device_properties(0).L2_cache_size)
    return [make() for _ in range(count)]


# ---- A cell --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to time: one call for each set of buffers.

    `error_share` is asked after the timing (see warploom.runtime.measure), `told` likewise: ours
    tells its kernel and what decided on it. A cell's figure is of the fastest `peer`.
    """

    name: str
    calls: Sequence[Call]
    error_share: Callable[[], float] | None = None
    told: Callable[[], tuple[str, str]] | None = None
    peer: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of a contender: its median and spread, or why it is absent."""

    contender: str
    seconds: float | None = None
    spread: float | None = None
    kernel: str | None = None
    error_share: float | None = None
    absent: str | None = None

    @property
    def right(self) -> bool:
        """True of a contender that is there and answers rightly."""
        return self.seconds is not None and (self.error_share or 0) <= 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One problem with all its contenders: ours first, its fastest right peer second."""

    name: str
    problem: Mapping[str, Any]
    entries: tuple[Entry, ...]
    floor: Floor | None = None

    @property
    def ratio(self) -> float | None:
        """The peer's time over ours; None without both, and beside a peer that is wrong."""
        if len(self.entries) < 2 or not self.entries[1].right:
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


def compete(
    name: str,
    problem: Mapping[str, Any],
    contenders: Sequence[Contender],
    floor: Floor | None = None,
    *,
    sampler: Sampling = graph_sampler,
    rounds: int = 9,
    discarded: int = 2,
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
                absent[contender.name] = first_line(error)
    timings = interleave(samplers, rounds=rounds, discarded=discarded)
    entries: dict[str, Entry] = {}
    for contender in contenders:
        if reason := absent.get(contender.name):
            entries[contender.name] = Entry(contender.name, absent=reason)
            continue
        timing = timings[contender.name]
        kernel, decision = contender.told() if contender.told else (None, "")
        share = contender.error_share() if contender.error_share else None
        entries[contender.name] = Entry(contender.name, timing.median, timing.spread, kernel, share)
        if contender is contenders[0] and decision:
            problem = {**problem, "decision": decision}
    first, *others = contenders
    peers = sorted((entries[one.name] for one in others if one.peer), key=_rank)
    more = (entries[one.name] for one in others if not one.peer)
    return Cell(name, problem, (entries[first.name], *peers, *more), floor)


def _rank(entry: Entry) -> tuple[bool, float]:
    """Those that are there and right come first, the fastest of them first."""
    return not entry.right, entry.seconds or 0.0


# ---- The document --------------------------------------------------------------------------------


def summary(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Verdicts counted, the ratios' geometric mean and 5th percentile, of cells as JSON."""
    cells = list(cells)
    counts = Counter(cell["verdict"] for cell in cells)
    ratios = [cell["ratio"] for cell in cells if cell["ratio"]]
    return {
        "cells": len(cells),
        **{verdict: counts[verdict] for verdict in ("won", "tied", "lost", "absent", "wrong")},
        "geometric_mean": geometric_mean(ratios) if ratios else None,
        "percentile_5": percentile(ratios, 5) if ratios else None,
    }


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
        self.document["cells"].insert(before, cell.as_json())
        self.write()

    def write(self) -> None:
        """Write the document as it stands."""
        replace_file(self.path, json.dumps(self.document, indent=1) + "\n")  # a run may be ended


def read(path: Path) -> dict[str, Any]:
    """Read a document; ValueError if it is of another schema."""
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {document.get('schema')}, not {SCHEMA}: measure anew")
    return document
