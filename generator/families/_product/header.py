"""What the heads of GEMMs' sources say of shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.generator.families._product.groups import MOST_GROUPS
from warploom.generator.families._product.layout import STORE_BUFFERS, ProductLayout
from warploom.generator.families._product.schedule import ProductSchedule
from warploom.generator.header import Memory, counted

PAIR_BYTES = 16  # a full and an empty barrier of a stage


def staging(layout: ProductLayout) -> Iterator[Memory]:
    """Yield the buffers that D is staged in, if it is."""
    if layout.store_bytes:
        each = layout.staging_bytes // STORE_BUFFERS
        consumers = counted(layout.consumers, "consumer")
        factors = f"{consumers} * {STORE_BUFFERS} buffers * {each}"
        yield Memory("staging", factors, layout.store_bytes)


def tables(layout: ProductLayout, group_bytes: int) -> Iterator[Memory]:
    """Yield the factors of rows and the table of groups, where a kernel has them."""
    factors = layout.kept_factor_bytes
    if factors:
        yield Memory("factors", f"{factors // 4} rows * 4", factors)
    if group_bytes:
        integers = group_bytes // (4 * (MOST_GROUPS + 1)) * (MOST_GROUPS + 1)
        yield Memory("groups", f"{integers} integers * 4", 4 * integers)


def pipeline(stages: int) -> Memory:
    """Return the shared memory of the barriers of a ring of stages."""
    return Memory("full, empty", f"{stages} stages * 2 * 8", stages * PAIR_BYTES)


def schedule_line(schedule: ProductSchedule, by: str, shares: str = "") -> str:
    """Return how D is divided into tiles, and these among CTAs; `by`: what computes a tile."""
    split = schedule.cluster_split_k
    words = (
        f"tile {'x'.join(map(str, schedule.tile))}{by}",
        counted(schedule.consumers, "consumer"),
        shares,
        f"k split over {split} CTAs" * (split > 1),
        f"{schedule.stages} stages",
        schedule.raster,
        f"swizzle {schedule.swizzle_size}",
        f"store {schedule.store}",
    )
    return f"  {', '.join(filter(None, words))}"
