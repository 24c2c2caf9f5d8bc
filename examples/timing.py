"""Times of contenders that take turns: a figure means something only beside its peer's."""

from __future__ import annotations

import random
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

    Each round samples all of them, `laps` calls in a row, in an order of its own: a GPU that one
    contender left cool lets the next run at a higher clock, so none always follows the same other.
    The orders are the same in every run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names, order = list(contenders), random.Random(0)  # noqa: S311 (not for secrets)
    for index in range(rounds + discarded):
        order.shuffle(names)
        for name in names:
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
