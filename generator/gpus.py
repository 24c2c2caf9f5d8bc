"""The one table of GPU kinds, and how the files that are kept for each are called.

A kind that has no row is taken to be like the default, scaled to its multiprocessors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GpuKind:
    """What is known of one GPU kind, from NVIDIA's data sheet or measured.

    name              as the driver gives it
    arch              the architecture that its kernels are for
    flops             dense products and sums a second by the operands' bits, for floors: what its
                      power sustains where that was measured, else the data sheet's peak
    bytes_per_second  of memory, likewise
    at_a_time         clusters of one to eight blocks that it holds at a time, as its driver counts
                      them (cuOccupancyMaxActiveClusters); empty where nobody asked it
    """

    name: str
    arch: str
    multiprocessors: int
    flops: Mapping[int, float]
    bytes_per_second: float
    at_a_time: Mapping[int, int] = field(default_factory=dict)


KINDS: dict[str, GpuKind] = {
    row.name: row
    for row in (
        GpuKind(
            "NVIDIA H200",
            "sm_90a",
            132,
            flops={16: 800e12, 8: 1600e12},  # measured
            bytes_per_second=4.35e12,  # measured
            at_a_time={1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15},  # alike on four
        ),
        GpuKind(
            "NVIDIA H100 80GB HBM3",
            "sm_90a",
            132,
            flops={16: 989.4e12, 8: 1978.9e12},  # data sheet, SXM
            bytes_per_second=3.35e12,  # data sheet, SXM
            at_a_time={1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15},  # of one
        ),
    )
}
# What there is no GPU for is planned as if for this one; it has every measured figure.
DEFAULT = KINDS["NVIDIA H200"]


def kind(name: str) -> GpuKind:
    """Return the row of the GPU kind called `name`, or the default's where it has none."""
    return KINDS.get(name, DEFAULT)


def file_name(gpu: str) -> str:
    """The name of a GPU kind's files: `NVIDIA H200` has nvidia_h200.json."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json"
