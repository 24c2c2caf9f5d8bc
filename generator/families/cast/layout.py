"""The shared memory of a CTA of tiles: bytes of q of x.T, largest magnitudes, and factors."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.elements import element
from warploom.generator.families.cast.schedule import (
    COLUMNS,
    TILE_THREADS,
    TILE_VALUES,
    CastOperation,
)

_FLOAT = 4  # bytes
_SIDES = 2  # x and x.T
_VECTOR = 16  # bytes that a thread moves at once


@dataclass(frozen=True, slots=True)
class CastLayout:
    """What a CTA has: nothing but for tiles."""

    operation: CastOperation

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: bytes of x.T where magnitudes were before, and factors."""
        operation = self.operation
        if operation.body != "tile":
            return 0
        whole = TILE_THREADS // 32 * _FLOAT
        if operation.transpose:
            whole = COLUMNS * COLUMNS
        if not operation.transposes_scales:
            return whole
        pitch = COLUMNS * element(operation.x).bytes + _VECTOR
        peaks = _SIDES * COLUMNS // TILE_VALUES * pitch
        blocks = COLUMNS // 32 if operation.block == "1x32" else 1
        factors = _SIDES * blocks * COLUMNS * _FLOAT
        flags = _VECTOR if operation.reads_factors else 0  # two, padded
        return max(whole, peaks) + factors + flags

    @property
    def ctas_per_sm(self) -> int:
        """The CTAs of tiles that an SM has at a time: as many as leave enough registers for x."""
        operation = self.operation
        if operation.x == "fp32" or operation.gate != "none":
            return 2
        if operation.transposes_scales and operation.rounding == "stochastic":
            return 2
        return 3 if operation.transposes_scales else 4
