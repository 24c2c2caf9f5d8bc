"""What is computed and how (fields of YAML, of names and of a search), and what of it is legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.generator.architectures import Architecture
from warploom.generator.families.table import Table
from warploom.generator.knob import frozen, knob
from warploom.generator.shapes import Shape
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


# ---- The shape of a problem ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class RouteShape(Shape):
    """Tokens, the experts that each chose, and the experts that there are."""

    tokens: int
    k: int
    experts: int


@dataclass(frozen=True, slots=True)
class RouteProblem:
    """The extents of one call, and where its ids lie.

    first   the id of the first of the experts
    steps   elements of ids from token to token, and from one choice of a token to the next
    """

    tokens: int
    k: int
    experts: int
    first: int
    steps: tuple[int, int]

    @property
    def pairs(self) -> int:
        """Of a token and an expert that it chose."""
        return self.tokens * self.k


# ---- Shared memory -------------------------------------------------------------------------------

_INT = 4  # bytes


@dataclass(frozen=True, slots=True)
class RouteLayout:
    """What a CTA has."""

    schedule: RouteSchedule

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a launch with as many experts as there may be."""
        return self.bytes_for(EXPERTS)

    def bytes_for(self, experts: int) -> int:
        """Dynamic shared memory of a launch: pairs that are skipped count as one expert more."""
        bins = experts + 1
        warps = self.schedule.warps
        return _INT * (bins * (warps + 2) + warps)


# ---- What is legal -------------------------------------------------------------------------------


def schedule_reasons(
    arch: Architecture, operation: RouteOperation, schedule: RouteSchedule
) -> list[str]:
    """Why the schedule does not fit the operation: every one does."""
    return []


# ---- Which schedule a problem gets that nothing was tuned for ------------------------------------


class RouteTable(Table[RouteOperation, RouteSchedule, RouteShape]):
    """The first schedule of a call's class is its own."""

    def features(self, operation: RouteOperation, shape: RouteShape) -> dict[str, int | str]:
        """The fields of operation and shape, and the pairs of a token and an expert."""
        return {**super().features(operation, shape), "pairs": shape.tokens * shape.k}
