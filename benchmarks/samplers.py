"""Samplers for what no CUDA graph shows: enqueued calls, whole steps, the host, a compiler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch

from warploom.runtime.measure import Call, Sampler, elapsed, laps_for

_SECONDS = 0.2  # of one sample of steps
_CALLS = 400  # of one sample of host time


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


def replayed(calls: Sequence[Call]) -> Sampler:
    """Return what times replays of a CUDA graph that has each call once, on the current stream.

    For calls that draw: a graph may take 2^32 numbers of torch's generator, and libraries ask for
    one for each score of an attention.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())

    def lap() -> None:
        for call in calls:
            call()

    with torch.cuda.stream(stream):
        lap()  # compiles, loads and plans, none of which a capture allows
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lap()
    sample = enqueued([graph.replay])
    return lambda: sample() / len(calls)


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
