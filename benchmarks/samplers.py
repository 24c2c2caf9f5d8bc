"""Samplers for what no CUDA graph shows: enqueued calls, whole steps, the host, a compiler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice
from typing import Any

import torch

from warploom.runtime.measure import Call, Sampler, elapsed, laps_for

_SECONDS = 0.2  # of one sample of steps
_CALLS = 400  # of one sample of host time
_PAUSE = 3e-4  # seconds before a single launch, at least; else twice what the last one took
_LONGEST = 0.05  # seconds: where it grew to this, the host is never first
_CLOCK = 2e9  # cycles a second, about: of a pause
_FLUSHED = 4  # L2 caches that are read before it


def enqueued(calls: Sequence[Call]) -> Sampler:
    """Return what times as many calls as fill a sample, on the current stream.

    Each takes the GPU longer than the host, which has all enqueued before they are done.
    """

    def lap() -> None:
        for call in calls:
            call()

    lap()  # compiles, loads and plans
    laps = laps_for(elapsed(lap))

    def all_laps() -> None:
        for _ in range(laps):
            lap()

    def sample() -> float:
        all_laps()  # untimed: keeps the GPU busy until the first timed call is enqueued
        return elapsed(all_laps) / (laps * len(calls))

    return sample


def alone(calls: Sequence[Call]) -> Sampler:
    """Return what times a single call behind a flush of L2 and a pause: as it runs in a model.

    Between other kernels the GPU is at its full clock and operands come from memory; in a loop of
    large products it is at its limit of power, where other kernels win. Reading flushes L2 and
    leaves nothing in it that had to be written to memory first. The GPU waits until the host has
    enqueued the call and all that it consists of: a call that takes the host longer than the GPU is
    not charged with that. Where the GPU was there first, it waits longer, and the sample is taken
    again.
    """
    for call in calls:
        call()  # compiles, loads and plans
    turns, pause, taken = cycle(calls), _PAUSE, 0.0

    def sample() -> float:
        nonlocal pause, taken
        call = next(turns)
        while True:
            begin, end = _marks()
            flushing, total = _flushing()
            torch.sum(flushing, dim=0, out=total)
            torch.cuda._sleep(round(_CLOCK * max(pause, 2 * taken)))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            late = begin.query()  # type: ignore[no-untyped-call]
            end.synchronize()
            taken = float(begin.elapsed_time(end)) * 1e-3
            if not late or pause > _LONGEST:  # so long waits a call for the GPU by itself
                return taken
            pause *= 2

    return sample


def _marks() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    return begin, end


@cache
def _flushing() -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor that is larger than L2, and one for its sum."""
    size = _FLUSHED * torch.cuda.get_device_properties(0).L2_cache_size // 4
    return torch.zeros(size, device="cuda"), torch.empty((), device="cuda")


def stepped(calls: Sequence[Call]) -> Sampler:
    """Return what times as many calls as fill a sample, from the first to the GPU's last."""

    def run(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for call in islice(cycle(calls), count):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    run(3 * len(calls))  # compiles, loads and plans
    count = max(10, round(_SECONDS / run(10)))
    return lambda: run(count)


def hosted(calls: Sequence[Call]) -> Sampler:
    """Return what times the host over many calls, and only then waits for the GPU."""
    (call,) = calls
    call()
    torch.cuda.synchronize()

    def sample() -> float:
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        seconds = (time.perf_counter() - begin) / _CALLS
        torch.cuda.synchronize()
        return seconds

    return sample


def said(calls: Sequence[Call]) -> Sampler:
    """Return what calls, and takes the seconds that the call says."""
    call: Any = calls[0]
    return lambda: float(call())
