"""Which tiles stream-K cuts: their k tiles go to all clusters alike, and each gets a range of them.

Where tiles fill some waves and a bit, those of the bit and of one wave are cut, so that every range
has the length of one to two tiles; where there are fewer tiles than clusters, all are, into equal
parts where that costs little. What is cut must save more than it costs, as measured on an H200
(docs/notebook.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.generator import limits
from warploom.generator.families._product.problem import Extents, parts_of_k, tiles
from warploom.generator.families._product.schedule import ProductSchedule
from warploom.generator.launches import DeviceLimits

# K tiles of a block in the time of which a part is left, found and added: 10 us of 128x256.
EXCHANGE = 8
# Of a range: clusters that are at different k of the same rows read them from L2 one by one.
APART = 8
MOST_PARTS = 16  # of a tile: one cluster adds them up
# Multiprocessors of the largest GPU that kernels are for: what room for parts is made for.
MOST_BLOCKS = 144


@dataclass(frozen=True, slots=True)
class Cut:
    """How the tiles of one call go to clusters: the first `tiles` in ranges, then whole ones.

    Of `split_k` each part of a tile's k counts as a tile.
    """

    clusters: int  # that are launched, each with a range where tiles are cut
    tiles: int
    all_tiles: int
    k_tiles: int  # of each tile, that a block of its own or of a split has

    @property
    def whole(self) -> int:
        """Whole tiles of the busiest cluster."""
        return -(-(self.all_tiles - self.tiles) // max(1, self.clusters))

    @property
    def range_k_tiles(self) -> int:
        """K tiles of the longest range."""
        return -(-self.tiles * self.k_tiles // max(1, self.clusters))

    @property
    def busiest(self) -> int:
        """K tiles of the busiest cluster."""
        return self.range_k_tiles + self.whole * self.k_tiles

    @property
    def waves(self) -> float:
        """How many times as long as for a whole tile the busiest cluster takes."""
        return self.whole + (self.range_k_tiles / self.k_tiles if self.tiles else 0)

    @property
    def aligned(self) -> bool:
        """Whether all tiles are cut alike, or none: clusters then come to the same k together."""
        return self.tiles == 0 or self.clusters % self.tiles == 0

    @property
    def lost(self) -> int:
        """K tiles of a cluster in whose time parts are exchanged, and operands waited for."""
        if not self.tiles:
            return 0
        return EXCHANGE + (0 if self.aligned else self.range_k_tiles // APART)

    @property
    def parts(self) -> int:
        """How many clusters a tile that is cut goes to, at most; 0 where none is."""
        if not self.tiles:
            return 0
        return -(-self.clusters // self.tiles) + (not self.aligned)


def cut(schedule: ProductSchedule, problem: Extents, device: DeviceLimits) -> Cut:
    """Divide a call's tiles; without stream-K all are whole, and clusters take turns."""
    count, k_tiles = tiles(schedule, problem), -(-problem.k // (schedule.tile[2] * schedule.split))
    size = schedule.cluster_size
    clusters, parts = device.clusters(size), parts_of_k(schedule, problem)
    count, k_tiles = count * parts, -(-k_tiles // parts)
    whole = Cut(min(count, clusters), 0, count, k_tiles)
    if not schedule.stream_k:
        return whole
    clusters = min(clusters, MOST_BLOCKS // size)
    if count < clusters:
        ranges = min(clusters, MOST_PARTS * count, count * k_tiles // EXCHANGE)
        found = Cut(max(count, ranges), count, count, k_tiles)
        alike = replace(found, clusters=found.clusters // count * count)
        if alike.busiest + alike.lost <= found.busiest + found.lost:
            found = alike
    else:
        found = Cut(clusters, count % clusters + clusters, count, k_tiles)
    counted = found.tiles * k_tiles * found.clusters <= limits.LARGEST  # as the kernel does
    return found if counted and found.busiest + found.lost <= whole.busiest else whole
