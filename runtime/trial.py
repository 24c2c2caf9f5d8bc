"""What measuring asks of a family: random operands for a problem, calls on them, and a check."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.measure import Call

FEWEST = 4  # sets of buffers
# Two right results differ by two roundings, and by this share of what results are like: it is more
# than sums in another order make, and less than one lost step of k does at any length.
ORDER = 2.0**-4
_CHUNK = 1 << 24  # elements that are compared at a time

_limited = threading.local()


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

    @property
    def results(self) -> Sequence[torch.Tensor]:
        """The tensors that calls on the first set write, which `held_share` is about."""
        ...


def wrong(out: torch.Tensor) -> torch.Tensor:
    """A tensor like `out`, full of what no right result is full of."""
    if out.dtype.is_floating_point:
        return torch.full(out.shape, math.nan, device=out.device).to(out.dtype)
    return torch.full_like(out, torch.iinfo(out.dtype).min)


def difference_share(found: torch.Tensor, kept: torch.Tensor) -> float:
    """The largest difference of two results of one call, as a share of what right ones may have.

    Integers of 32 bits are equal, those of 8 may be rounded apart. What is not finite is infinitely
    far from everything. Where none is further off than what results are like allows, as nearly
    always, it is a share of that alone, which is somewhat more, and a tenth of the work.
    """
    one, other = found.reshape(-1), kept.reshape(-1)
    if not one.numel():
        return 0.0
    places = [slice(at, at + _CHUNK) for at in range(0, one.numel(), _CHUNK)]
    if not kept.dtype.is_floating_point:
        apart = max(float((one[at].long() - other[at].long()).abs().max()) for at in places)
        return apart if kept.dtype.itemsize == 1 else (math.inf if apart else 0.0)
    norms = [
        float(torch.linalg.vector_norm(_wide(other[at]), dtype=torch.float32)) for at in places
    ]
    usual = max(ORDER * math.hypot(*norms) / math.sqrt(one.numel()), 1e-30)  # and of zeros
    furthest = [_furthest(one[at], other[at]) for at in places]
    if math.isfinite(usual) and all(apart <= usual for apart in furthest):
        return max(furthest) / usual
    rounding = 2 * unit_roundoff(kept.dtype)
    worst = 0.0
    for at in places:
        right = other[at].float()
        share = (one[at].float() - right).abs_().div_(right.abs_().mul_(rounding).add_(usual))
        worst = max(worst, float(share.nan_to_num_(nan=math.inf).max()))
    return worst


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Values of a type that torch computes with."""
    return values.float() if values.dtype.itemsize == 1 else values


def _furthest(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors, in their type; NaN where one is among them."""
    return max(abs(float(end)) for end in torch.aminmax(_wide(one) - _wide(other)))


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect garbage now and not inside: a CUDA graph that is destroyed ends another's capture."""
    enabled = gc.isenabled()  # a program may have disabled it for good
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
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
    if most := getattr(_limited, "most", 0):
        return int(most)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(FEWEST, buffer_sets(set_bytes, l2_bytes))


@contextmanager
def exactly(sets: int) -> Iterator[None]:
    """Trials that this thread makes inside take so many sets, whatever the L2 cache holds."""
    before, _limited.most = getattr(_limited, "most", 0), sets
    try:
        yield
    finally:
        _limited.most = before


def buffer_sets(set_bytes: int, l2_bytes: int) -> int:
    """How many sets of buffers, used in turn, outlast an L2 cache of `l2_bytes` twice over."""
    return max(1, math.ceil(2 * l2_bytes / max(1, set_bytes)))
