"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.knob import frozen, knob
from warploom.generator.specification import KernelSpec

EXPERTS = 1024  # of one call, at most
PAIRS = 4  # of a token and an expert, that a thread loads at once
WARP = 32  # threads


@frozen
class RouteOperation:
    """What is computed: the order of rows by expert: where the rows of each expert end, the (token,
    expert) pair of each row, and the row of each pair. The rows of an expert keep the order of
    their pairs.
    """

    ids: Literal["int64", "int32"] = knob(doc="element type of the expert ids [tokens, k]")
    family: Literal["route"] = knob(default="route", doc="the kernel family")

    @property
    def cpp(self) -> str:
        """The C++ type of ids."""
        return f"{self.ids}_t"


@frozen
class RouteSchedule:
    """How it is computed: by one cluster, each of whose warps counts consecutive pairs."""

    threads: Literal[128, 256, 512, 1024] = knob(name="{}", doc="threads of a CTA")
    cluster: Literal[1, 2, 4, 8] = knob(
        default=1,
        name="cluster{}",
        doc="CTAs of the one cluster, which read each other's counts through distributed "
        "shared memory",
    )

    @property
    def tile(self) -> tuple[int]:
        """Pairs that all warps load at once."""
        return (self.threads * self.cluster * PAIRS,)

    @property
    def warps(self) -> int:
        """Of a CTA."""
        return self.threads // WARP


RouteSpec = KernelSpec[RouteOperation, RouteSchedule]
