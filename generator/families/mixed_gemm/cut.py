"""How the tiles of one call go to clusters, of a product with weights of few bits."""

from __future__ import annotations

from warploom.generator import limits
from warploom.generator.families._product.cut import MOST_BLOCKS, MOST_PARTS, Cut
from warploom.generator.families._product.problem import Extents, tiles
from warploom.generator.families.mixed_gemm.schedule import MixedGemmSchedule
from warploom.generator.launches import DeviceLimits

FEW_WAVES = 4  # of tiles: all of them are cut
EXCHANGE = 5  # k tiles in the time of which a part is left, found and added, as measured


def cut(schedule: MixedGemmSchedule, problem: Extents, device: DeviceLimits) -> Cut:
    """Divide a call's tiles: each to a cluster of its own where its blocks split k.

    With stream-K all tiles are cut, wherever that is: a range of slabs lies in memory in one piece,
    and a part of few rows of A is small. Where tiles make many waves, those of one wave and of what
    is left over are.
    """
    count, k_tiles = tiles(schedule, problem), -(-problem.k // schedule.tile[2])
    if schedule.split > 1:
        return Cut(count, 0, count, -(-k_tiles // schedule.split))
    clusters = device.clusters(1) * schedule.blocks
    whole = Cut(min(count, clusters), 0, count, k_tiles)
    if not schedule.stream_k:
        return whole
    clusters = min(clusters, MOST_BLOCKS * schedule.blocks)
    if count < FEW_WAVES * clusters:
        ranges = min(clusters, MOST_PARTS * count, count * k_tiles)
        found = Cut(max(1, ranges), count, count, k_tiles)
    else:
        found = Cut(clusters, count % clusters + clusters, count, k_tiles)
    counted = found.tiles * k_tiles * found.clusters <= limits.LARGEST  # as the kernel does
    return found if counted else whole


def waves(schedule: MixedGemmSchedule, problem: Extents, device: DeviceLimits) -> float:
    """How much of D the busiest multiprocessor gets, in tiles of 64 by 64."""
    found, each = cut(schedule, problem, device), schedule.row_blocks * schedule.tile[0] / 64
    if schedule.split > 1:
        return -(-found.clusters * schedule.split // device.multiprocessors) / schedule.split * each
    lost = EXCHANGE / found.k_tiles if found.tiles else 0
    return (found.waves + lost) * schedule.blocks * each
