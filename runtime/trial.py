"""What measuring asks of a family: random operands for a problem, calls on them, and a check."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.measure import Call

FEWEST = 4  # sets of buffers


class Trial(Protocol):
    """One problem on fresh random data."""

    def calls(self, spec: KernelSpec) -> Sequence[Call]:
        """One call of a kernel for each set of buffers; together they outlast the L2 cache."""
        ...

    def error_share(self, spec: KernelSpec) -> float:
        """Run a kernel and return its largest error, as a share of what is allowed.

        The output is full of what no right result is full of before.
        """
        ...

    def held_share(self) -> float:
        """The largest error of what the first set's output holds, as a share of what is allowed."""
        ...


def wrong(out: torch.Tensor) -> torch.Tensor:
    """A tensor like `out`, full of what no right result is full of."""
    if out.dtype.is_floating_point:
        return torch.full(out.shape, math.nan, device=out.device).to(out.dtype)
    return torch.full_like(out, torch.iinfo(out.dtype).min)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect garbage now and not inside: a CUDA graph that is destroyed ends another's capture."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def generator(device: str, seed: int) -> torch.Generator | None:
    """What random operands are drawn by; on `meta` there is nothing to draw."""
    return None if device == "meta" else torch.Generator(device).manual_seed(seed)


def sets_for(set_bytes: int, device: str) -> int:
    """How many sets of buffers a trial takes: `buffer_sets` of this GPU; one on the CPU.

    Never less than four: where two of 64 MB lie may suit a kernel or not (2048x4096x4096, 128x256:
    0.91 to 1.05 of the default's time from loop to loop).
    """
    if device != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(FEWEST, buffer_sets(set_bytes, l2_bytes))


def buffer_sets(set_bytes: int, l2_bytes: int) -> int:
    """How many sets of buffers, used in turn, outlast an L2 cache of `l2_bytes` twice over."""
    return max(1, math.ceil(2 * l2_bytes / max(1, set_bytes)))
