"""What the operations and schedules of all products say, and what follows from it.

A family's own are dataclasses of these: each of the first properties is one of its fields, or a
constant where its kernels have no choice.
"""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import Element
from warploom.generator.epilogue import EpilogueStep
from warploom.generator.knob import frozen
from warploom.generator.wgmma import WARPGROUP

Roles = Literal["cooperative", "pingpong"]
Raster = Literal["along_m", "along_n"]
Store = Literal["tma", "direct"]


@frozen
class ProductOperation:
    """D = epilogue(A B): what of an operation the epilogue and the store depend on."""

    @property
    def family(self) -> str:
        """The name of the family."""
        raise NotImplementedError

    @property
    def d(self) -> str:
        """The element type of D."""
        raise NotImplementedError

    @property
    def epilogue(self) -> tuple[EpilogueStep, ...]:
        """The steps between the accumulators and D, in order."""
        raise NotImplementedError

    @property
    def batched(self) -> bool:
        """Whether D has batches that are no rows of one matrix."""
        return False

    @property
    def by_rows(self) -> bool:
        """Whether its batches are groups of D's rows, each with a B, wherever these begin."""
        return False

    @property
    def accumulator(self) -> Element:
        """The element type that the tensor core accumulates in."""
        raise NotImplementedError


@frozen
class ProductSchedule:
    """How D is divided into tiles, and tiles among blocks and their warpgroups."""

    @property
    def tile(self) -> tuple[int, int, int]:
        """(m, n, k) of one block."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """K tiles in flight."""
        raise NotImplementedError

    @property
    def cluster(self) -> tuple[int, int]:
        """Blocks along (m, n) that multicast what they share."""
        return (1, 1)

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply, beside one that loads."""
        raise NotImplementedError

    @property
    def raster(self) -> Raster:
        """The direction in which tiles follow each other in a band of `swizzle_size` tiles."""
        raise NotImplementedError

    @property
    def swizzle_size(self) -> int:
        """How many tiles wide a band is."""
        raise NotImplementedError

    @property
    def store(self) -> Store:
        """How D leaves the registers."""
        raise NotImplementedError

    @property
    def kernel_schedule(self) -> Roles:
        """Whether consumers share a tile."""
        return "cooperative"

    @property
    def swap_ab(self) -> bool:
        """Whether the 64-row side of wgmma takes n."""
        return False

    @property
    def producer_registers(self) -> int:
        """Of the producer's threads where there are two consumers."""
        return 40

    @property
    def l2_promotion(self) -> int:
        """Bytes that L2 fetches for each of TMA's requests of operands."""
        return 256

    @property
    def cluster_split_k(self) -> int:
        """Blocks that share a tile's k, in a cluster of their own."""
        return 1

    @property
    def stream_k(self) -> bool:
        """Whether clusters share the k of tiles that do not fill a wave."""
        return False

    @property
    def split_k(self) -> int:
        """Parts of k that are tiles of their own, whose sums a second launch adds up."""
        return 1

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return WARPGROUP * (1 + self.consumers)

    @property
    def multicast(self) -> int:
        """Blocks that load their operands together."""
        return self.cluster[0] * self.cluster[1]

    @property
    def along_both(self) -> bool:
        """Whether a block shares A with some blocks of its cluster, and B with others."""
        return min(self.cluster) > 1

    @property
    def cluster_size(self) -> int:
        """Blocks of one cluster."""
        return self.multicast * self.cluster_split_k

    @property
    def rows(self) -> int:
        """Rows of wgmma in one tile: its m, or its n when swapped."""
        return self.tile[1] if self.swap_ab else self.tile[0]

    @property
    def columns(self) -> int:
        """Columns of wgmma in one tile, of one instruction."""
        return self.tile[0] if self.swap_ab else self.tile[1]

    @property
    def finished(self) -> int:
        """Columns of wgmma in one tile that one block finishes."""
        return self.columns // max(1, self.cluster_split_k)

    @property
    def sharing(self) -> int:
        """Consumers that share one tile."""
        return self.consumers if self.kernel_schedule == "cooperative" else 1
