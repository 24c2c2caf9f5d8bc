"""Times of contenders that take turns: a figure means something only beside its peer's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Call = Callable[[], object]


def interleave(
    contenders: Mapping[str, Call],
    device: torch.device,
    *,
    rounds: int,
    laps: int = 1,
    discarded: int = 1,
) -> dict[str, list[float]]:
    """Seconds a call of each contender, in each round that counts.

    Each round samples all of them, `laps` calls in a row, and begins with another one: none always
    follows the same other.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(rounds + discarded):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            taken = elapsed(contenders[name], device, laps)
            if index >= discarded:
                seconds[name].append(taken)
    return seconds


def elapsed(call: Call, device: torch.device, laps: int) -> float:
    """Seconds a call: on a GPU by its own clock, from one event to the next."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(laps):
            call()
        return (time.perf_counter() - began) / laps
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    torch.cuda.synchronize()
    begin.record()
    for _ in range(laps):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / laps


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The median round of each contender."""
    return {name: median(taken) for name, taken in seconds.items()}
