"""16-bit pieces of fp32 matrices, of which GEMMs of 16 bits make GEMMs of fp32."""

from __future__ import annotations

from typing import Any

from warploom.generator.families.base import Family
from warploom.generator.families.fp32_pieces import launch
from warploom.generator.families.fp32_pieces.schedule import (
    TILE,
    VALUES,
    Fp32PiecesOperation,
    Fp32PiecesProblem,
    Fp32PiecesSchedule,
    Fp32PiecesShape,
    Fp32PiecesSpec,
)

__all__ = [
    "FAMILY",
    "Fp32PiecesOperation",
    "Fp32PiecesProblem",
    "Fp32PiecesSchedule",
    "Fp32PiecesShape",
]


class Fp32Pieces(
    Family[Fp32PiecesOperation, Fp32PiecesSchedule, Fp32PiecesShape, Fp32PiecesProblem]
):
    """Pieces of fp32 matrices."""

    def context(self, spec: Fp32PiecesSpec) -> dict[str, Any]:
        """The sizes that the schedule does not say."""
        wide = spec.operation.spans == "wide"
        return {"values": VALUES, "tile": TILE, "peak_rows": launch.PEAK_ROWS, "wide": wide}


FAMILY = Fp32Pieces()
