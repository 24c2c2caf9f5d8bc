"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.knob import frozen, knob
from warploom.generator.specification import KernelSpec

PieceElement = Literal["fp16", "bf16"]
Layout = Literal["row", "col"]
Spans = Literal["any", "wide"]

VALUES = 8  # of a row that a thread splits at once: of each piece 16 bytes
PLACE = 64  # elements that places of pieces are multiples of: a k tile of a GEMM of 16 bits
TILE = 64  # rows, and columns along k, of a CTA that transposes
LEAST_PART, MOST_PARTS = 256, 32  # columns along k of a part whose largest magnitudes are kept


@frozen
class Fp32PiecesOperation:
    """What is computed: fp32 x as a sum of 16-bit pieces, stored next to each other along K, the
    highest first.
    """

    q: PieceElement = knob(
        name="{}x{}",
        doc="element type of the pieces; fp16: each row of x is first multiplied by a power of two",
    )
    count: Literal[2, 3] = knob(default=2, name="", doc="pieces of each value; fp16 takes two")
    layout: Layout = knob(
        default="row",
        doc="memory layout of x: row (each row is contiguous along K) or col (K is the strided "
        "dimension)",
    )
    family: Literal["fp32_pieces"] = knob(default="fp32_pieces", doc="the kernel family")
    spans: Spans = knob(
        default="any",
        name="{}",
        later=True,
        doc="wide: three bf16 pieces of rows times the powers of two of fp16 pieces, made only if "
        "fp16 pieces do not hold the rows",
    )

    @property
    def scaled(self) -> bool:
        """Whether rows are scaled by powers of two."""
        return self.q == "fp16"

    @property
    def value_bytes(self) -> int:
        """Bytes of memory that are moved for one value: of x, once more for scales of columns."""
        reads = 2 if self.scaled and self.layout == "col" else 1
        return 4 * reads + 2 * self.count


@frozen
class Fp32PiecesSchedule:
    """How it is computed: a CTA splits a row, or a tile of 64x64 if it transposes."""

    threads: Literal[128, 256, 512] = knob(
        name="{}", doc="threads of a CTA; kernels that transpose require 256"
    )

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns that a CTA loads at once, where it has a row."""
        return 1, self.threads * VALUES


Fp32PiecesSpec = KernelSpec[Fp32PiecesOperation, Fp32PiecesSchedule]
