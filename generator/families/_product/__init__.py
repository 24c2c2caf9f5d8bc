"""What families of matrix products share: tiles, epilogue, parts of k, parameters, launches."""

from __future__ import annotations

from warploom.generator.families._product.launch import SINGLE, Batches, ProductProblem, tiles
from warploom.generator.families._product.schedule import (
    ProductOperation,
    ProductSchedule,
    Raster,
    Roles,
    Store,
)

__all__ = [
    "SINGLE",
    "Batches",
    "ProductOperation",
    "ProductProblem",
    "ProductSchedule",
    "Raster",
    "Roles",
    "Store",
    "tiles",
]
