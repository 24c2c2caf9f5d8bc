"""A contest: contenders for one problem, timed in turns and verified.

Contenders of a cell take turns (measure.py); the first is ours, the second its fastest peer, and
the cell's figure is their ratio. Whatever is missing or refuses a problem is absent, with the
reason. Times are seconds. `warploom bench` and the project's own benchmarks are made of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from warploom.errors import WarploomError
from warploom.generator.gpus import DEFAULT, GpuKind, kind
from warploom.printable import first_line
from warploom.runtime.measure import Call, Sampler, graph_sampler, interleave
from warploom.runtime.trial import uncollected

Sampling = Callable[[Sequence[Call]], Sampler]
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
