"""What the heads of GEMMs' sources say of shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.generator.families._product.layout import STORE_BUFFERS, ProductLayout
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
    if layout.factor_bytes:
        yield Memory("factors", f"{layout.factor_bytes // 4} rows * 4", layout.factor_bytes)
    if group_bytes:
        yield Memory("groups", f"{group_bytes // 4} integers * 4", group_bytes)


def pipeline(stages: int) -> Memory:
    """Return the shared memory of the barriers of a ring of stages."""
    return Memory("full, empty", f"{stages} stages * 2 * 8", stages * PAIR_BYTES)
