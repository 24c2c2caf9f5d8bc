"""Box, swizzle and stride rules of the Tensor Memory Accelerator, as data.

A tile lies in shared memory as one or more boxes; a box is rows of `span` bytes (128, 64, 32 or
16), swizzled over 8 rows. Sources: CUDA driver API, cuTensorMapEncodeTiled; PTX ISA, wgmma
shared-memory matrix layouts. `cute/arch/mma_sm90_desc.hpp` has the descriptor's bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from warploom.generator.elements import Element
from warploom.generator.rules import Reason

SPANS = (128, 64, 32, 16)
LAYOUT_TYPES = {128: 1, 64: 2, 32: 3, 16: 0}  # GmmaDescriptor::layout_type_ by span
PITCH_BYTES = 16  # TMA reads rows whose pitch and base are multiples of this
PITCH_END = 1 << 40  # bytes, that every pitch is below
LARGEST_EXTENT = 1 << 32


def widest_span(extent: int, bits: int) -> int:
    """Return the widest span whose elements divide `extent`; 0 when not even 16 bytes do."""
    for span in SPANS:
        if extent * bits % (span * 8) == 0:
            return span
    return 0


def readable(pointer: int, *pitches: int) -> bool:
    """True when TMA can read a tensor of this base address and these pitches in place."""
    return math.gcd(pointer, *pitches) % PITCH_BYTES == 0


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A request for one tensor map over up to five dimensions, the innermost first.

    `tensor` names the tensor that it addresses. Extents and box are in elements; `pitches` are the
    bytes from one index to the next of every dimension but the innermost; `span` is the swizzle
    span in bytes (16: none), `promotion` the bytes that L2 fetches at a time.
    """

    tensor: str
    element: Element
    extents: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    span: int
    promotion: int = 256

    def fits(self, pointer: int) -> bool:
        """True when TMA can address the tensor at `pointer`."""
        extents, pitches = self.extents, self.pitches
        counted = min(extents) >= 1 and max(extents) <= LARGEST_EXTENT
        apart = not pitches or (min(pitches) >= 0 and max(pitches) < PITCH_END)
        return counted and apart and readable(pointer, *pitches)


@dataclass(frozen=True, slots=True)
class OperandTile:
    """How one stage of A or B lies in shared memory, and how wgmma walks it.

    K-major: one box, a row per index of m or n, the row holding tile k. MN-major (16-bit elements
    only): a box for each `box_columns` of m or n, a row per k. All offsets are in bytes.
    """

    element: Element
    k_major: bool
    extent: int  # of m or n
    tile_k: int
    span: int
    slices: int  # a multicast loads the tile in this many parts, one by each block that shares it
    blocks: int  # of a cluster, that share the tile
    gated: bool = False  # 8 rows of a gate and 8 of up, in turn: see `gated_map`

    @property
    def box_columns(self) -> int:
        """Contiguous elements of one box row."""
        return self.span * 8 // self.element.bits

    @property
    def rows(self) -> int:
        """Rows of one whole box."""
        return self.extent if self.k_major else self.tile_k

    @property
    def in_turn(self) -> bool:
        """Whether blocks that share the tile load all of it, by turns: it has no equal slices."""
        return self.blocks > self.slices

    @property
    def slice_rows(self) -> int:
        """Rows that one block of the cluster loads."""
        return self.rows // self.slices

    @property
    def box(self) -> tuple[int, int]:
        """The tensor map's box, innermost first."""
        return self.box_columns, self.slice_rows

    @property
    def boxes(self) -> int:
        """Boxes side by side in the tile."""
        return 1 if self.k_major else self.extent // max(1, self.box_columns)

    @property
    def box_bytes(self) -> int:
        """Bytes of one whole box."""
        return self.rows * self.span

    @property
    def bytes(self) -> int:
        """Bytes of the tile."""
        return self.boxes * self.rows * self.span

    @property
    def leading_offset(self) -> int:
        """The descriptor's leading offset: from one box to the next; unused when K-major."""
        return 0 if self.k_major else self.box_bytes

    @property
    def stride_offset(self) -> int:
        """The descriptor's stride offset: from 8 rows to the next 8."""
        return 8 * self.span

    @property
    def k_step(self) -> int:
        """From one instruction's k to the next: 32 bytes along a row, or wgmma_k rows."""
        return 32 if self.k_major else self.element.wgmma_k * self.span

    @property
    def layout_type(self) -> int:
        """The descriptor's swizzle mode."""
        return LAYOUT_TYPES[self.span]


GATE_ROWS = 8  # of a gate, then of up: the columns of wgmma that a thread has the same ones of


def operand_tile(
    element: Element, *, k_major: bool, extent: int, tile_k: int, blocks: int, gated: bool = False
) -> OperandTile:
    """Lay out one operand's tile, which so many `blocks` of a cluster share; `operand_reason` says
    whether it is legal. A slice is whole groups of 8 rows, which swizzles repeat in, and of as many
    rows of a gate as of up where the tile is `gated`.
    """
    span = widest_span(tile_k if k_major else extent, element.bits)
    group = 2 * GATE_ROWS if gated else 8
    slices = blocks if (extent if k_major else tile_k) % (group * max(1, blocks)) == 0 else 1
    return OperandTile(element, k_major, extent, tile_k, span, slices, blocks, gated)


def gated_map(plain: TensorMap, *, interleaved: bool) -> TensorMap:
    """The map of a K-major operand's rows as a gated tile has them: 8 of the gate, then 8 of up.

    In memory all rows of the gate come before those of up, or each before its own where they are
    `interleaved`. A box is 128 bytes of k, 8 rows, these of gate and up, and so on: no row of a
    weight has to be moved.
    """
    (k, rows, *batches), (row, *apart) = plain.extents, plain.pitches
    inner, between = (2 * row, row) if interleaved else (row, rows // 2 * row)
    outer = GATE_ROWS * inner
    columns, box_rows, *rest = plain.box
    return replace(
        plain,
        extents=(k, GATE_ROWS, 2, rows // (2 * GATE_ROWS), *batches),
        pitches=(inner, between, outer, *apart),
        box=(columns, GATE_ROWS, 2, box_rows // (2 * GATE_ROWS), *rest),
    )


def operand_reason(field: str, tile: OperandTile) -> Reason:
    """The tile can be loaded in boxes, and wgmma can read it."""
    if not tile.k_major and tile.element.bits != 16:
        return f"{field} {tile.element.name} not K-major: wgmma reads only 16-bit types MN-major"
    if tile.k_major and tile.span != 128:
        return f"{field} tile k {tile.tile_k}: a K-major row is 128 bytes"
    if not tile.k_major and tile.span < 32:
        return f"{field} extent {tile.extent}: an MN-major tile must be a multiple of 16"
    if tile.gated and not tile.k_major:
        return f"{field} not K-major with a gate: must be K-major, as a torch weight is"
    if tile.gated and tile.extent % (2 * GATE_ROWS):
        return f"{field} extent {tile.extent} with a gate: must be a multiple of {2 * GATE_ROWS}"
    if tile.slice_rows > 256:
        return f"{field} box of {tile.slice_rows} rows: a box has at most 256"
    return None
