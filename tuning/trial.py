"""What measuring asks of a family: random operands for a problem, calls on them, and a check."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Protocol

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.measure import Call


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


def sets_for(set_bytes: int, device: str) -> int:
    """How many sets of buffers, used in turn, outlast the L2 cache twice over; one on the CPU."""
    if device != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, ceil(2 * l2_bytes / max(1, set_bytes)))
