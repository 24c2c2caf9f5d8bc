"""The shared memory of a CTA: a tile of x, bytes of q, and largest magnitudes of columns."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.elements import element
from warploom.generator.families.cast.schedule import COLUMNS, CastOperation

SM_BYTES = 228 * 1024  # of shared memory (CUDA C++ Programming Guide, compute capability 9.0)
_RESERVED = 1024  # of each CTA, by the driver
_WARPS = 4  # that share a column of a tile
_MOST_CTAS = 4  # of an SM: as many leave each thread 64 registers


@dataclass(frozen=True, slots=True)
class CastLayout:
    """What a CTA has: nothing but for tiles."""

    operation: CastOperation

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the tile of x, one of q, and four numbers a column."""
        if self.operation.body != "tile":
            return 0
        tile = COLUMNS * COLUMNS
        return tile * element(self.operation.x).bytes + tile + _WARPS * COLUMNS * 4

    @property
    def ctas_per_sm(self) -> int:
        """The CTAs of tiles that an SM has at a time."""
        return min(_MOST_CTAS, SM_BYTES // (self.shared_bytes + _RESERVED))
