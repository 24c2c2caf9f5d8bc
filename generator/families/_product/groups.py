"""Groups of rows that end at offsets in device memory: what is known of them before a launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from warploom.errors import ProblemError
from warploom.generator.families._product import launch
from warploom.generator.families._product.launch import MOST_PARTS, Cut
from warploom.generator.families._product.schedule import ProductSchedule
from warploom.generator.parameters import Field, int32
from warploom.generator.shapes import LARGEST

ProblemT = TypeVar("ProblemT", bound=Any)

MOST_GROUPS = 1024
"""Groups of a grouped GEMM: a CTA has their ends in shared memory."""


def table_bytes(tables: int) -> int:
    """Shared memory of tables with an entry for each group, and one more in front."""
    return -(-4 * tables * (MOST_GROUPS + 1) // 16) * 16


def most_tiles(schedule: ProductSchedule, problem: ProblemT) -> ProblemT:
    """The GEMM of as many tiles as groups of rows may have, whatever their offsets are.

    Each has whole tiles of its own, of which all groups but one may fill one with a single row.
    """
    rows = schedule.tile[0] * schedule.cluster[0]
    groups = min(problem.batches, problem.m)
    most: ProblemT = replace(problem, m=(-(-problem.m // rows) + groups - 1) * rows, batches=1)
    return most


# ---- Stream-K where only the device knows how many tiles there are -------------------------------

FEW_WAVES = 4  # of tiles: all of them are cut


def into_ranges(whole: Cut, clusters: int) -> Cut:
    """Return `whole` with ranges of k tiles for `clusters`, where these can be counted in 32 bits.

    If tiles make few waves, all are cut; else those of one wave and of what is left over are. Here
    the tiles are those that groups may have at most; templates/_product/walk.cuh.jinja does the
    same with those that they have.
    """
    count, k_tiles = whole.all_tiles, whole.k_tiles
    if count < FEW_WAVES * clusters:
        ranges = min(clusters, MOST_PARTS * count, count * k_tiles)
        found = Cut(max(1, ranges), count, count, k_tiles)
    else:
        found = Cut(clusters, count % clusters + clusters, count, k_tiles)
    counted = found.tiles * k_tiles * found.clusters <= LARGEST
    return found if counted else whole


def few_tiles() -> Field[Any]:
    """The parameter that the device decides by which tiles are cut."""
    return int32("few_tiles", "of fewer all are cut; 0: none is", _few_tiles)


def _few_tiles(at: launch.AtLaunch) -> int:
    clusters = at.cut.clusters
    few = FEW_WAVES * clusters
    counted = few * at.cut.k_tiles * clusters <= LARGEST  # as the kernel does
    return few if counted else 0


def refuse_groups(groups: int) -> None:
    """Raise ProblemError for more groups than a table has entries."""
    if groups > MOST_GROUPS:
        raise ProblemError(
            f"{groups} groups",
            rule=f"must be at most {MOST_GROUPS}, whose ends a CTA keeps in shared memory",
            fix="call it for some of the groups at a time",
        )
