"""What is computed and how (fields of YAML, of names and of a search), and what of it is legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.generator.architectures import Architecture
from warploom.generator.knob import frozen, knob
from warploom.generator.shapes import Shape
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
        doc="any: the pieces are always made; wide: three bf16 pieces of the rows, scaled as for "
        "fp16 pieces, are made only if two fp16 pieces do not represent the values",
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


# ---- The shape of a problem ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Fp32PiecesShape(Shape):
    """m rows of k columns: all leading dimensions of x are rows."""

    m: int
    k: int


@dataclass(frozen=True, slots=True)
class Fp32PiecesProblem:
    """The dimensions of one call.

    x_pitch    elements between rows of x, of columns where these are contiguous
    place      elements from a piece to the next in a row of q: k, padded to 64
    """

    m: int
    k: int
    x_pitch: int
    place: int


# ---- What is legal -------------------------------------------------------------------------------

TILE_THREADS = 256


def operation_reasons(operation: Fp32PiecesOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    reasons = []
    if operation.q == "fp16" and operation.count != 2:
        reasons.append(f"count {operation.count} of q fp16: must be 2, which hold the bits of fp32")
    if operation.spans == "wide" and (operation.q, operation.count) != ("bf16", 3):
        told = f"q {operation.q}, count {operation.count} with spans wide"
        reasons.append(f"{told}: must be bf16 and 3, which hold any row")
    return reasons


def schedule_reasons(
    arch: Architecture, operation: Fp32PiecesOperation, schedule: Fp32PiecesSchedule
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    if operation.layout == "col" and schedule.threads != TILE_THREADS:
        return [f"threads {schedule.threads} with layout col: must be {TILE_THREADS}"]
    return []
