"""Times and checks results: what the demo, the benchmarks and the tuner have in common.

Contenders take turns, since a figure means something only beside its peer in the same loop, in an
order of its own each round: a GPU at its power limit runs faster just after one that needs less. On
the GPU a contender's calls are captured into one CUDA graph, which keeps the host out of the time;
alone.py times them one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, inf
from statistics import median, quantiles

import torch

Call = Callable[[], object]
Sampler = Callable[[], float]  # measures once: seconds a call

SAMPLE_SECONDS = 4e-3  # what one sample lasts at least


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call, in each round that counts."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median round."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """The distance between the quartiles, relative to the median."""
        low, _, high = quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / self.median


def interleave(
    samplers: Mapping[str, Sampler], *, rounds: int = 9, discarded: int = 2
) -> dict[str, Timing]:
    """Sample each contender once a round, in turn; the first `discarded` rounds do not count.

    No contender always follows the same other: FlashAttention-3's backward, 16k tokens at dim 128,
    measured 591 to 616 TFLOP/s after a kernel as fast as itself, 676 after one of half its speed.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    order, shuffled = list(samplers), random.Random(0)  # noqa: S311 (no secret)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            samples[name].append(samplers[name]())
    return {name: Timing(tuple(taken[discarded:])) for name, taken in samples.items()}


def laps_for(lap_seconds: float) -> int:
    """How many laps of `lap_seconds` make a sample."""
    return max(1, ceil(SAMPLE_SECONDS / lap_seconds))


def graph_sampler(calls: Sequence[Call]) -> Sampler:
    """Capture `calls` into a CUDA graph and return what times one of them on the current stream.

    Give one call for each set of buffers: sets that do not fit the L2 cache together are read from
    memory. Calls must not wait for the GPU; they write to buffers of their own.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())

    def lap() -> None:
        for call in calls:
            call()

    with torch.cuda.stream(stream):
        lap()  # compiles, loads and plans, none of which a capture allows
        laps = laps_for(elapsed(lap))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for _ in range(laps):
                lap()
        except BaseException as error:  # nor does the thread capture any longer
            with suppress(RuntimeError):
                graph.capture_end()
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(f"a CUDA graph cannot capture it: {error}") from error
        graph.capture_end()

    def sample() -> float:
        graph.replay()  # untimed: keeps the GPU busy until the timed replay is enqueued
        return elapsed(graph.replay) / (laps * len(calls))

    return sample


def elapsed(call: Call) -> float:
    """Seconds that the GPU takes for `call`; the host waits for the end."""
    begin, end = marks()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def marks() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Two events to be recorded before and after what is timed."""
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    return begin, end


def largest_share(value: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest |value - exact| / bound of the elements; equal elements are right."""
    wide = value.double()
    share = torch.where(wide == exact, 0.0, (wide - exact).abs() / bound)
    return float(share.nan_to_num(nan=inf, posinf=inf).max()) if share.numel() else 0.0
