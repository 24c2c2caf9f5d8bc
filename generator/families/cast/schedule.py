"""What is computed and how (fields of YAML, of names and of a search), and what of it is legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.generator.architectures import Architecture
from warploom.generator.elements import element
from warploom.generator.epilogue import Float, Function
from warploom.generator.families.table import Table
from warploom.generator.knob import frozen, knob
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec

Quantized = Literal["e4m3", "e5m2", "int8"]
Block = Literal["tensor", "row", "1x128", "128x128", "1x32"]
Rounding = Literal["nearest", "stochastic"]
Body = Literal["tile", "row", "vectors"]
Gate = Literal["none", Function]

VALUES = 16  # of a row that a thread quantizes at once: 16 bytes of q
TILE_VALUES = 8  # where it has as many rows of them: 8 bytes of q, and of q of x.T
COLUMNS = 128  # of a block of scales, and of a tile, which has as many rows
TILE_THREADS = 256  # that a tile of COLUMNS rows and columns is cut for


@frozen
class CastOperation:
    """What is computed: q and scales, such that q times the scale of its block approximates x."""

    x: Float = knob(doc="element type of x [m, n]")
    q: Quantized = knob(doc="element type of q")
    block: Block = knob(
        doc="the rows x columns that share a scale; scales of 1x32 are e8m0 (mxfp8), others fp32"
    )
    static: bool = knob(default=False, doc="scales are given by the caller instead of computed")
    transpose: bool = knob(
        default=False,
        doc="also write the quantized transpose of x, which has its own scales where a block "
        "is a row or part of one",
    )
    pow2: bool = knob(default=False, doc="round scales to powers of two; those of 1x32 always are")
    rounding: Rounding = knob(
        default="nearest",
        doc="nearest: ties to even; stochastic: at random, with Philox numbers from a state in "
        "device memory",
    )
    amax: bool = knob(default=False, doc="also raise an fp32 scalar to the largest magnitude of x")
    family: Literal["cast"] = knob(default="cast", doc="the kernel family")
    gate: Gate = knob(
        default="none",
        name="gate_{}",
        later=True,
        doc="quantize function(gate) * up, where z [m, 2n] holds gate and up, in place of x; "
        "none: quantize x",
    )
    gradient: bool = knob(
        default=False,
        later=True,
        doc="with a gate: quantize the gradient of z, computed from z and from the gradient of "
        "the gate's result [m, n]",
    )
    offsets: bool = knob(
        default=False,
        later=True,
        doc="rows are in groups that end at offsets in device memory. In q of x.T, zeros fill each "
        "group up to a multiple of 128 columns, so that no block of scales has values of two "
        "groups. Requires transpose",
    )

    @property
    def body(self) -> Body:
        """Which kernel it is: of tiles in shared memory, of whole rows, or of vectors."""
        if self.transpose or (self.block == "128x128" and not self.static):
            return "tile"
        return "row" if self.block == "row" and not self.static else "vectors"

    @property
    def values(self) -> int:
        """The values of a row that a thread quantizes at once."""
        return TILE_VALUES if self.body == "tile" else VALUES

    @property
    def reads_amax(self) -> bool:
        """Whether a launch of its own computes the largest magnitude of x before."""
        return self.block == "tensor" and not self.static

    @property
    def reads_factors(self) -> bool:
        """Whether a launch of its own computes the scales of rows and columns before."""
        return self.block == "row" and self.transpose and not self.static

    @property
    def transposes_scales(self) -> bool:
        """Whether q of x.T has scales of its own."""
        return self.transpose and self.block in ("row", "1x128", "1x32")

    @property
    def value_bytes(self) -> int:
        """Bytes of memory that are moved for one value, where nothing is read from a cache."""
        values = 1.0 if self.gate == "none" else 1.5 if self.gradient else 2.0  # of x, for one
        reads = values * (1 + (self.reads_amax or self.reads_factors))
        return int(reads * element(self.x).bytes) + 1 + self.transpose


@frozen
class CastSchedule:
    """How it is computed."""

    threads: Literal[128, 256, 512] = knob(
        name="{}x{}", doc="threads of a CTA; kernels that work on tiles require 256"
    )
    vectors: Literal[1, 2, 4] = knob(
        default=1,
        name="",
        doc="vectors of 16 values that a thread loads at once; kernels that work on tiles "
        "require 1",
    )
    reduce: Literal["warp", "cta"] = knob(
        default="warp",
        doc="threads that share a row while its scale is computed: a warp or the whole CTA",
    )

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns that a CTA loads at once."""
        return self.threads * VALUES // COLUMNS * self.vectors, COLUMNS


CastSpec = KernelSpec[CastOperation, CastSchedule]


# ---- The shape of a problem ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class CastShape(Shape):
    """m rows of n columns: all leading dimensions of x are rows."""

    m: int
    n: int


def most_tiles(m: int, groups: int) -> int:
    """The tiles of COLUMNS rows that as many groups of m rows have at most, wherever they end.

    All groups but one may have a single row in a tile of their own.
    """
    some = min(m, groups)
    return some + (m - some) // COLUMNS


@dataclass(frozen=True, slots=True)
class CastProblem:
    """The extents of one call, and elements between neighbours of what it has.

    x_pitch, q_pitch, q_t_pitch, gradient_pitch   from row to row
    scale, scale_t                from block to block, down and across

    `groups` is how many groups its rows are in, where they are.
    """

    m: int
    n: int
    x_pitch: int
    q_pitch: int
    scale: tuple[int, int]
    q_t_pitch: int = 0
    scale_t: tuple[int, int] = (0, 0)
    gradient_pitch: int = 0
    groups: int = 0


# ---- Shared memory -------------------------------------------------------------------------------

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
        scan = 2 * TILE_THREADS // 32 * _FLOAT + _VECTOR if operation.offsets else 0
        if not operation.transposes_scales:
            return whole + scan
        pitch = COLUMNS * element(operation.x).bytes + _VECTOR
        peaks = 0 if operation.static else _SIDES * COLUMNS // TILE_VALUES * pitch
        blocks = COLUMNS // 32 if operation.block == "1x32" else 1
        factors = _SIDES * blocks * COLUMNS * _FLOAT
        flags = _VECTOR if operation.reads_factors else 0  # two, padded
        return max(whole, peaks) + factors + scan + flags

    @property
    def ctas_per_sm(self) -> int:
        """The CTAs of tiles that an SM has at a time: as many as leave enough registers for x."""
        operation = self.operation
        if operation.x == "fp32" or operation.gate != "none":
            return 2
        if not operation.transposes_scales:
            return 4
        if operation.rounding == "stochastic":
            return 2
        reads = operation.static or operation.reads_factors
        return 2 if operation.offsets and reads and operation.q == "int8" else 3


# ---- What is legal -------------------------------------------------------------------------------


def operation_reasons(operation: CastOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    reasons = []
    block = operation.block
    if block == "1x32":
        if operation.q == "int8":
            reasons.append("q int8 of block 1x32: must be e4m3 or e5m2, as mxfp8 has them")
        if operation.static:
            reasons.append("static with block 1x32: must be computed, as e8m0 scales are not read")
        if operation.pow2:
            reasons.append("pow2 with block 1x32: must be left out, as e8m0 has nothing else")
    if operation.static and operation.pow2:
        reasons.append("pow2 with static: must be left out, as scales are what they are")
    if operation.gate != "none":
        if operation.x == "fp32":
            reasons.append("x fp32 with a gate: must be fp16 or bf16")
        if not operation.transpose:
            reasons.append("a gate without transpose: must be of both orientations")
    elif operation.gradient:
        reasons.append("gradient without a gate: must be of one")
    if operation.offsets:
        if not operation.transpose:
            reasons.append("offsets without transpose: must be with it, as rows alone have no gaps")
        if block not in ("tensor", "row", "1x128"):
            reasons.append(f"offsets with block {block}: must be tensor, row or 1x128")
    if operation.amax and block != "tensor":
        reasons.append(f"amax with block {block}: must be tensor")
    return reasons


def schedule_reasons(
    arch: Architecture, operation: CastOperation, schedule: CastSchedule
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    reasons = []
    if operation.body == "tile" and (schedule.threads, schedule.vectors) != (TILE_THREADS, 1):
        reasons.append(
            f"threads {schedule.threads}, vectors {schedule.vectors} of a tile: must be "
            f"{TILE_THREADS} and 1"
        )
    if operation.body != "row" and schedule.reduce != "warp":
        reasons.append(f"reduce {schedule.reduce}: must be warp but for computed scales of rows")
    return reasons


# ---- Which schedule a problem gets that nothing was tuned for ------------------------------------


class CastTable(Table[CastOperation, CastSchedule, CastShape]):
    """The first schedule of a call's class is its own."""

    def features(self, operation: CastOperation, shape: CastShape) -> dict[str, int | str]:
        """The fields of operation and shape, and which kernel the operation is."""
        return {**super().features(operation, shape), "body": operation.body}
