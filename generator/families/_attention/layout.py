"""How tiles of both passes lie in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.families._attention.operation import Operation
from warploom.generator.tensor_maps import LAYOUT_TYPES

WARP_ROWS = 16  # whose scores a warp has in the forward pass, and that ldmatrix reads at a time
PIECE = 16  # bytes


@dataclass(frozen=True, slots=True)
class Boxes:
    """A tile of 16-bit elements: boxes side by side, each as wide as a swizzle span."""

    span: int  # bytes of a box's row
    boxes: int  # side by side in a tile

    def span_of(self, tensor: str) -> int:
        """Bytes of a box's row of an operand."""
        return self.span

    @property
    def box_columns(self) -> int:
        """Elements of a box's row."""
        return self.span // 2

    @property
    def layout_type(self) -> int:
        """The descriptor's swizzle mode."""
        return LAYOUT_TYPES[self.span]


def staging_bytes(operation: Operation, rows: int, columns: int) -> int:
    """Bytes that a warp stages of what changes its `rows` by `columns` scores.

    Rows lie by odd numbers of pieces of 16 bytes, so that no two of 8 begin in the same banks.
    """
    sizes = [modifier.staged_bytes for modifier in operation.modifiers]
    pieces = [columns * size // PIECE for size in sizes if size]
    return -(-rows // WARP_ROWS) * WARP_ROWS * sum((row | 1) * PIECE for row in pieces)


def word_bytes(q_tile: int, kv_tile: int, stages: int = 2) -> int:
    """What says which weights of a tile are kept: a bit for each, in all stages, by whole KiB."""
    return -(-q_tile * kv_tile * stages // 8192) * 1024
