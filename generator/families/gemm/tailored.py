"""Schedules that are tailored to one product: its tiles fill whole waves, by clusters of any size.

A tile can be as wide as a wave of tiles needs it, since columns of wgmma go in steps of 8; what
blocks would load alone they share in larger clusters. Where tiles leave half of the GPU idle, k is
split into as many parts as fill one wave. cuBLAS's kernels for an H200 do all of it where there are
few tiles for each multiprocessor (docs/notebook.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from warploom.generator.architectures import architecture
from warploom.generator.elements import element
from warploom.generator.epilogue import gate_of
from warploom.generator.families._product.table import SHORTEST_PART
from warploom.generator.families.gemm.rules import CLUSTERS, complete, schedule_reasons
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule
from warploom.generator.families.gemm.shape import GemmShape
from warploom.generator.launches import DeviceLimits

WIDEST = {64: 256, 128: 256, 256: 128}  # columns of a tile, by its rows of wgmma
WAVES = 4  # at most
ALIKE = 2  # schedules that differ in their clusters alone: those that load the least
PAIRS = ((1, 1), (2, 1), (1, 2))  # clusters of parts of k
MOST_PARTS = 24  # of which the second launch reads eight at a time
LINE = 128  # bytes: a tile's k, and what L2 fetches for a request


def tailored(
    operation: GemmOperation, shape: GemmShape, device: DeviceLimits
) -> list[GemmSchedule]:
    """Return legal schedules, each of the fewest waves that its rows and its cluster can have.

    Of those that differ in their clusters alone, these are the ones with the fewest waves.
    """
    if (operation.sparse, operation.groups) != ("none", "none") or not (
        shape.m and shape.n and shape.k and shape.batches
    ):
        return []
    tried = (
        found
        for swap_ab in (False, True)
        for rows in WIDEST
        for cluster in CLUSTERS
        for found in _tried(operation, shape, device, swap_ab, rows, cluster)
    )
    arch = architecture(device.arch)
    legal = [found for found in tried if not schedule_reasons(arch, operation, found[1])]
    found: dict[GemmSchedule, list[GemmSchedule]] = {}
    for _, one in sorted(legal, key=lambda found: (found[0], _loaded(found[1]))):
        alike = found.setdefault(replace(one, cluster=(1, 1)), [])
        if len(alike) < ALIKE:
            alike.append(one)
    split = (
        one
        for swap_ab in (False, True)
        for rows in WIDEST
        for one in _split(operation, shape, device, swap_ab, rows)
    )
    legal_split = [one for one in split if not schedule_reasons(arch, operation, one)]
    return [one for alike in found.values() for one in alike] + legal_split


def _widths(across: int, widest: int) -> list[int]:
    """Columns of a tile, of those that make as many tiles the fewest."""
    steps = range(16, widest + 1, 16)
    return list({-(-across // columns): columns for columns in reversed(steps)}.values())


def _split(
    operation: GemmOperation, shape: GemmShape, device: DeviceLimits, swap_ab: bool, rows: int
) -> Iterator[GemmSchedule]:
    """Schedules, legal or not, of one wave of parts of k that are worth a second launch."""
    down, across = (shape.n, shape.m) if swap_ab else (shape.m, shape.n)
    tile_k = LINE // element(operation.a).bytes
    for columns in _widths(across, WIDEST[rows]):
        for cluster in PAIRS:
            along, beside = reversed(cluster) if swap_ab else cluster
            clusters = -(-down // (rows * along)) * -(-across // (columns * beside)) * shape.batches
            most = -(-shape.k // tile_k) // SHORTEST_PART
            parts = min(device.clusters(along * beside) // clusters, MOST_PARTS, most)
            if parts < 2 or along * rows - rows >= down or beside * columns - columns >= across:
                continue
            fields = {
                "tile": (columns, rows, tile_k) if swap_ab else (rows, columns, tile_k),
                "swap_ab": swap_ab,
                "cluster": cluster,
                "consumers": 1 if rows == min(WIDEST) else 2,
                "l2_promotion": LINE,
                "split_k": parts,
            }
            yield complete(device.arch, operation, fields)


def _loaded(schedule: GemmSchedule) -> float:
    """Rows of A and B that a block loads by itself for a k tile."""
    return schedule.tile[0] / schedule.cluster[1] + schedule.tile[1] / schedule.cluster[0]


def _tried(
    operation: GemmOperation,
    shape: GemmShape,
    device: DeviceLimits,
    swap_ab: bool,
    rows: int,
    cluster: tuple[int, int],
) -> Iterator[tuple[int, GemmSchedule]]:
    """Waves and schedules, legal or not, of so many rows of wgmma; none where blocks were idle."""
    down, across = (shape.n, shape.m) if swap_ab else (shape.m, shape.n)
    along, beside = reversed(cluster) if swap_ab else cluster
    row_tiles = -(-down // rows)
    if along > row_tiles:
        return
    lines = -(-row_tiles // along) * shape.batches  # of clusters, one above the other
    # Swapped, TMA stores 16 rows of D at a time; rows of an operand in memory are 32 bytes or more.
    narrow = not swap_ab and operation.layout_b == "col" and not gate_of(operation.epilogue)
    step = 8 if narrow else 16
    for waves in range(1, WAVES + 1):
        clusters = waves * device.clusters(along * beside) // lines  # beside each other
        columns = -(-across // (max(1, clusters) * beside * step)) * step
        if clusters and columns <= WIDEST[rows]:
            break
    else:
        return
    if columns * (beside - 1) >= across:
        return
    tile_k = LINE // element(operation.a).bytes
    fields = {
        "tile": (columns, rows, tile_k) if swap_ab else (rows, columns, tile_k),
        "swap_ab": swap_ab,
        "cluster": cluster,
        "l2_promotion": LINE,
    }
    consumers = 1 if rows == min(WIDEST) else 2
    yield waves, complete(device.arch, operation, {**fields, "consumers": consumers})
    if waves > 1:  # it hides the epilogues of all waves but the last
        yield waves, complete(device.arch, operation, {**fields, "kernel_schedule": "pingpong"})
