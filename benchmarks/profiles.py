"""Where the time of a call goes: the kernels that it launches, and functions of the host."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

CALLS = 10  # that are profiled, after as many that are not
LONGEST = 15  # rows of kernels, and of functions
COLUMNS = ["case", "where", "what", "calls", "us", "share"]
Call = Callable[[], object]
Row = Mapping[str, Any]


def profiled(call: Call) -> list[Row]:
    """The kernels and the host's functions that take most of the time of a call.

    A row has "where" (GPU or host), "what", and of one call "calls" and "seconds". The first row of
    the GPU is all of its kernels, the first of the host how long it takes to enqueue a call, by its
    profiler, under which it is slower. The backward pass runs on the thread that is profiled.
    """
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(CALLS):
            call()
        return [*_kernels(call), *_functions(call)]


def _kernels(call: Call) -> list[Row]:
    """On a CPU: the operators of torch."""
    kinds, on_gpu = torch.profiler.ProfilerActivity, torch.cuda.is_available()
    with torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU]) as profiler:
        for _ in range(CALLS):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    found = [
        _row(
            "GPU" if on_gpu else "torch",
            one.key,
            one.count,
            1e-6 * (one.self_device_time_total if on_gpu else one.self_cpu_time_total),
        )
        for one in profiler.key_averages()
        if not on_gpu or one.self_device_time_total  # or it is the host's part of a launch
    ]
    return _longest(found, "all kernels" if on_gpu else "all operators")


def _functions(call: Call) -> list[Row]:
    """By the time that each spends itself."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(CALLS):
        call()
    profiler.disable()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    stats: Any = pstats.Stats(profiler)
    found = [
        _row("host", f"{Path(file).name}:{line} {name}", count, own)
        for (file, line, name), (_, count, own, *_) in stats.stats.items()
    ]
    return _longest(found, "all functions")


def _row(where: str, what: str, calls: int, seconds: float) -> dict[str, Any]:
    return {"where": where, "what": what, "calls": calls / CALLS, "seconds": seconds / CALLS}


def _longest(found: Sequence[Row], title: str) -> list[Row]:
    """The sum of all, and those that take most."""
    if not found:
        return []
    whole = {name: sum(one[name] for one in found) for name in ("calls", "seconds")}
    ordered = sorted(found, key=lambda one: -float(one["seconds"]))
    return [{"where": found[0]["where"], "what": title, **whole}, *ordered[:LONGEST]]


def table(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of COLUMNS; the share is that of Warploom's time as it was measured."""
    return [
        (
            str(cell["name"]),
            one["where"],
            one["what"],
            f"{one['calls']:g}",
            f"{1e6 * one['seconds']:.1f}",
            f"{100 * one['seconds'] / cell['entries'][0]['seconds']:.0f} %",
        )
        for cell in cells
        if cell["entries"][0]["seconds"]
        for one in cell["problem"].get("profile", ())
    ]
