"""How a matrix of a product lies in memory, whether TMA can read it there, and its copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.generator.tensor_maps import PITCH_BYTES, readable
from warploom.runtime.counters import counters


@dataclass(frozen=True, slots=True)
class Placement:
    """A matrix that TMA can read: `row` or `col` major, elements between its rows (columns)."""

    layout: str
    pitch: int


def _pitch(extent: int, count: int, stride: int, size: int) -> int:
    """The stride between `count` rows of `extent` elements; a single row may claim any."""
    return stride if count > 1 else -(-extent * size // PITCH_BYTES) * PITCH_BYTES // size


def place(matrix: torch.Tensor, allowed: tuple[str, ...]) -> Placement | None:
    """Return how TMA reads `matrix` in place, in one of the `allowed` layouts, or None.

    Rows must not overlap: a broadcast view (stride 0) is never read in place.
    """
    rows, columns = matrix.shape
    row_stride, column_stride = matrix.stride()
    size = matrix.element_size()
    if rows == 0 or columns == 0:
        return Placement(allowed[0], max(rows, columns))
    for layout in allowed:
        extent, count, inner, outer = (
            (columns, rows, column_stride, row_stride)
            if layout == "row"
            else (rows, columns, row_stride, column_stride)
        )
        pitch = _pitch(extent, count, outer, size)
        contiguous = inner == 1 or extent == 1
        if contiguous and pitch >= extent and readable(matrix.data_ptr(), pitch * size):
            return Placement(layout, pitch)
    return None


def padded_room(like: torch.Tensor, layout: str, device: torch.device | str) -> torch.Tensor:
    """Return memory for a copy of `like` [.., rows, columns] that TMA can read in `layout`.

    Its rows (or columns) start at multiples of 16 bytes.
    """
    *batches, rows, columns = (like if layout == "row" else like.mT).shape
    size = like.element_size()
    pitch = -(-columns * size // PITCH_BYTES) * PITCH_BYTES // size
    room = torch.empty((*batches, rows, pitch), dtype=like.dtype, device=device)[..., :columns]
    return room if layout == "row" else room.mT


def padded_copy(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy `matrix` (or a stack of them) to where TMA can read it. Counted."""
    counters.add("copies")
    return padded_room(matrix, layout, matrix.device).copy_(matrix)
