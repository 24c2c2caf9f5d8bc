"""How a packed weight lies in memory: slabs of 64 rows by 128 k, one layout for every M.

A slab is one piece of memory that one bulk copy brings: the codes as two bricks of 64 k each (of 2
bits as one of 128), the scales of its groups, and their zero points. Slabs lie row block by row
block, k inside. Rows are padded to 64 and k to 128, by codes that stand for 0, scales of 1, or of
the largest that kernels take where that is less, and zero points of 0. (Only where a row has one
zero point does padded k stand for another number: there activations are 0.)

A brick is in the order in which the 128 threads of a warpgroup hold wgmma's A operand in registers
(PTX ISA, wgmma: A fragment). Thread t = 32 w + 4 l + q has rows 16 w + l and 8 below, of each
step's k the `width` from q * width and as many half a step on. A step is 16 of k and width 2 for
activations of 16 bits, 32 and 4 for those of 8. Which bits of its words are whose the table of
formats says (WordOrder).
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.errors import SpecificationError
from warploom.generator.formats import (
    SCALE_TYPES,
    STEPS,
    ScaleType,
    WeightFormat,
    WordOrder,
    weight_format,
)
from warploom.printable import brief

ROWS = 64
DEPTH = 128  # k of a slab
BRICK_K = 64  # of formats of 4 bits and more
THREADS = 128
PIECE_BYTES = 16  # of a thread, side by side: one 128-bit load


def position(row: int) -> int:
    """Return where a row's scale is among the 64 of a group: rows r and r + 8 side by side."""
    return 16 * (row // 16) + 2 * (row % 8) + row % 16 // 8


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """What a slab is made of. SpecificationError for what the format does not have.

    `group` is k that share a scale, None: all of them; then scales and zero points are no part of
    the slabs, but two vectors over the rows. `scale` is a key of SCALE_TYPES, `activations` one of
    those that the format's codes can be in order for.
    """

    format: str
    group: int | None
    scale: str
    activations: str

    def __post_init__(self) -> None:
        row = weight_format(self.format)
        for field, value, allowed in (
            ("group", self.group, row.groups),
            ("scale", self.scale, row.scales),
            ("activations", self.activations, tuple(row.orders)),
        ):
            if value not in allowed or isinstance(value, bool | float):
                raise SpecificationError(
                    f"{field} {brief(value)} of format {self.format}",
                    rule=f"must be one of {', '.join(map(str, allowed))}",
                    fix="use one of them",
                )

    @property
    def row(self) -> WeightFormat:
        """The format's row in the table."""
        return weight_format(self.format)

    @property
    def order(self) -> WordOrder:
        """Where codes lie in a thread's words."""
        return self.row.orders[self.activations]

    @property
    def step(self) -> int:
        """The k of one wgmma."""
        return STEPS[self.activations]

    @property
    def largest_scale(self) -> float | None:
        """Up to which size kernels take scales; None: as far as their type goes.

        Where they are per channel no kernel multiplies them into weights.
        """
        return self.order.largest_scale if self.group else None

    @property
    def scale_of_zeros(self) -> float:
        """The scale of what is 0: 1, or the largest, as kernels multiply by it all the same."""
        return min(1.0, self.largest_scale or 1.0)

    @property
    def scale_type(self) -> ScaleType:
        """The type of the scales."""
        return SCALE_TYPES[self.scale]

    @property
    def groups(self) -> int:
        """Groups of k in a slab; 0 where scales are per channel."""
        return DEPTH // self.group if self.group else 0

    @property
    def brick_k(self) -> int:
        """The k of a brick: 64, or as many as fill a piece of each thread."""
        return max(BRICK_K, 8 * THREADS * PIECE_BYTES // (ROWS * self.row.bits))

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes that a thread has in a brick, PIECE_BYTES * THREADS apart."""
        return self.row.bits * self.brick_k * ROWS // (8 * THREADS * PIECE_BYTES)

    @property
    def codes_bytes(self) -> int:
        """Bytes of a slab's bricks; its scales begin there."""
        return ROWS * DEPTH * self.row.bits // 8

    @property
    def scales_bytes(self) -> int:
        """Bytes of a slab's scales; its zero points begin behind them."""
        return self.groups * ROWS * self.scale_type.bytes

    @property
    def zeros_bytes(self) -> int:
        """Bytes of a slab's zero points, one each."""
        return self.groups * ROWS if self.row.has_zeros else 0

    @property
    def bytes(self) -> int:
        """Bytes of a slab: a multiple of 16, which bulk copies ask for."""
        return self.codes_bytes + self.scales_bytes + self.zeros_bytes
