"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import element
from warploom.generator.epilogue import Float, Function
from warploom.generator.knob import frozen, knob
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
        return self.block == "row" and self.transpose

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
