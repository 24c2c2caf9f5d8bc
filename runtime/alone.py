"""Times single launches as models run them: behind a flush of L2, at the clocks between kernels.

In a tight loop of large products the GPU is at its limit of power. Cycles are free there, and a
smaller tile wins for the energy that it saves: what such a loop picked took 1.05 to 1.29 of
cuBLAS's time in a step of a model, where others take as long (docs/notebook.md, 2026-11-23).
Between other kernels the GPU is at its full clock, and operands come from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import cycle

import torch

from warploom.runtime.measure import Call, Sampler, marks

PAUSE = 3e-4  # seconds before a launch, at least; else twice what the last one took
LONGEST = 0.05  # seconds: where a pause grew to this, the host is never first
_CLOCK = 2e9  # cycles a second, at most: pauses of a slower clock are longer
_FLUSHED = 4  # L2 caches that are read


class Flush:
    """Reads more of a GPU's memory than its L2 cache holds, on the current stream.

    Reading leaves nothing in it that had to be written to memory before something else fits.
    """

    def __init__(self, device: int) -> None:
        size = _FLUSHED * torch.cuda.get_device_properties(device).L2_cache_size // 4
        self._read = torch.zeros(size, device=f"cuda:{device}")
        self._total = torch.empty((), device=f"cuda:{device}")

    def __call__(self) -> None:
        """Enqueue it."""
        torch.sum(self._read, dim=0, out=self._total)


def wait(seconds: float) -> None:
    """Let the current stream wait."""
    torch.cuda._sleep(round(_CLOCK * seconds))  # type: ignore[no-untyped-call]


def alone(calls: Sequence[Call], *, flushed: bool = True) -> Sampler:
    """Return what times a single call behind a flush and a pause, each call in turn.

    What is not `flushed` before a call may be in L2 from the call before.

    The GPU waits until the host has enqueued the call and all that it consists of: a call that
    takes the host longer than the GPU is not charged with that. Where the GPU was there first, it
    waits longer, and the sample is taken again.
    """
    for call in calls:
        call()  # compiles, loads and plans
    turns, pause, taken = cycle(calls), PAUSE, 0.0
    flush = _flush(torch.cuda.current_device()) if flushed else None

    def sample() -> float:
        nonlocal pause, taken
        call = next(turns)
        while True:
            begin, end = marks()
            if flush is not None:
                flush()
            wait(max(pause, 2 * taken))
            begin.record()
            call()
            end.record()
            late = begin.query()  # type: ignore[no-untyped-call]
            end.synchronize()
            taken = float(begin.elapsed_time(end)) * 1e-3
            if not late or pause > LONGEST:  # so long waits a call for the GPU by itself
                return taken
            pause *= 2

    return sample


@cache
def _flush(device: int) -> Flush:
    """The flush of all samplers on a GPU: they take turns."""
    return Flush(device)
