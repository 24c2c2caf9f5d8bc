"""The tile scheduler of grouped GEMMs with stream_k, in plain Python: who multiplies which k tiles.

It is what templates/_product/walk.cuh.jinja says in C++, with which a test compares it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from warploom.generator.families._product.launch import MOST_PARTS
from warploom.generator.families.gemm import gemm_layout
from warploom.generator.specification import KernelSpec


@dataclass(frozen=True)
class Unit:
    """The k tiles from `begin` to `end` of one tile."""

    tile: int
    begin: int
    end: int


@dataclass(frozen=True)
class Walk:
    """The tiles that offsets make, and how the k tiles of those that are cut go to clusters.

    few        of fewer tiles all may be cut; 0: none is
    exchange   k tiles that a cut must save
    """

    few: int
    exchange: int
    tiles: int
    k_tiles: int
    clusters: int

    @cached_property
    def cut(self) -> int:
        """How many tiles are cut: the first."""
        cut = self.tiles % self.clusters + self.clusters if self.few else 0
        cut = self.tiles if self.tiles < self.few else cut
        longest = max(-(-cut * self.k_tiles // self.clusters), -(-self.k_tiles // MOST_PARTS))
        whole = -(-cut // self.clusters) * self.k_tiles
        return cut if longest + self.exchange < whole else 0

    @cached_property
    def ranges(self) -> int:
        """How many clusters have a range."""
        return max(1, min(self.clusters, self.cut * min(self.k_tiles, MOST_PARTS)))

    def start(self, cluster: int) -> int:
        """The first k tile of a cluster's range, counted through all tiles."""
        return min(cluster, self.ranges) * self.cut * self.k_tiles // self.ranges

    def first(self, tile: int) -> int:
        """The cluster whose range has the first k tile of a tile that is cut."""
        return ((tile * self.k_tiles + 1) * self.ranges - 1) // (self.cut * self.k_tiles)

    def units(self, cluster: int) -> Iterator[Unit]:
        """Yield what a cluster multiplies, in its order: its range from the end, then tiles."""
        low, high = self.start(cluster), self.start(cluster + 1)
        while low < high:
            tile = (high - 1) // self.k_tiles
            start = tile * self.k_tiles
            yield Unit(tile, max(low - start, 0), high - start)
            high = max(low, start)
        for tile in range(self.cut + cluster, self.tiles, self.clusters):
            yield Unit(tile, 0, self.k_tiles)


def tiles_of(spec: KernelSpec, n: int, counts: Sequence[int]) -> int:
    """The tiles, counted in clusters, of groups that have so many rows."""
    schedule: Any = spec.schedule
    rows, columns = (schedule.tile[i] * schedule.cluster[i] for i in range(2))
    return sum(-(-count // rows) for count in counts) * -(-n // columns)


def exchange_of(spec: KernelSpec) -> int:
    """K tiles that a cut of a kernel must save."""
    operation: Any = spec.operation
    schedule: Any = spec.schedule
    return gemm_layout(operation, schedule).exchange
