"""What is computed and how (fields of YAML, of names and of a search), and what of it is legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.formats import (
    FORMATS,
    SCALE_TYPES,
    Activations,
    WeightFormat,
    weight_format,
)
from warploom.generator.knob import frozen, knob
from warploom.generator.shapes import Shape, Work
from warploom.generator.slabs import DEPTH, ROWS, THREADS, SlabLayout
from warploom.generator.specification import KernelSpec

Format = Literal["int4", "uint4", "int8", "e4m3", "mxfp4", "mxfp8", "nvfp4", "int2", "ternary"]


@frozen
class DequantizeOperation:
    """What is computed: W [E, N, K], scale * (code - zero point) of quantized weights, rounded to
    fp32, multiplied by a second-level scale and rounded again where there is one, and then rounded
    to the element type of W. The bits are those of `PackedWeight.dequantize`.
    """

    w: Literal["bf16", "fp16"] = knob(name="{}_{}", doc="element type of W")
    format: Format = knob(name="", doc="format of the codes")
    group: Literal[0, 16, 32, 64, 128] = knob(
        name="g{}_{}",
        doc="values along K that share a scale and a zero point; 0: all of K, one scale per "
        "channel",
    )
    scale: Literal["fp16", "bf16", "fp32", "e8m0", "e4m3"] = knob(
        name="", doc="element type of the scales: e8m0 for mxfp4 and mxfp8, e4m3 for nvfp4"
    )
    activations: Activations = knob(
        default="16-bit",
        name="for_{}",
        doc="activations that the weight was quantized for, which decide the order of its codes: "
        "16-bit, e4m3 or int8",
    )
    layout: Literal["slabs", "rows"] = knob(
        default="slabs",
        name="{}",
        doc="how codes are stored. slabs: as in a PackedWeight; rows: as an e4m3 tensor [E, N, K], "
        "with an fp32 or e8m0 scale for each 128x128",
    )
    family: Literal["dequantize"] = knob(default="dequantize", doc="the kernel family")

    @property
    def weight(self) -> WeightFormat:
        """The row of the format."""
        return weight_format(self.format)

    @property
    def slab(self) -> SlabLayout:
        """How the codes are stored; SpecificationError where no codes are."""
        return SlabLayout(self.format, self.group or None, self.scale, self.activations)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: 64 rows of 128 values of 16 bits, and padding of each."""
        return 0 if self.layout == "rows" else ROWS * (2 * DEPTH + self.slab.step)

    def moved(self, experts: int, n: int, k: int) -> int:
        """Bytes that are read and written: slabs, each with its padding, or rows; and W."""
        if self.layout == "rows":
            scales = -(-n // DEPTH) * -(-k // DEPTH) * SCALE_TYPES[self.scale].bytes
            return experts * (scales + 3 * n * k)
        blocks, of_row = -(-n // ROWS), 4 * self.weight.scaled_twice
        if self.group == 0:
            of_row = self.slab.scale_type.bytes + self.weight.has_zeros
        read = blocks * (-(-k // DEPTH) * self.slab.bytes + ROWS * of_row)
        return experts * (read + 2 * n * k)


@frozen
class DequantizeSchedule:
    """How it is computed: a CTA has 64 rows of W, and each of its four warps 16 of them."""

    slabs: Literal[1, 2, 4, 8] = knob(
        name="slabs{}",
        doc="slabs of 128 along K that a CTA has; one is loaded while the one before is stored",
    )
    ctas_per_sm: Literal[4, 6, 8] = knob(
        name="ctas{}",
        doc="CTAs that an SM has registers for: more of them keep more loads in flight",
    )

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return THREADS

    @property
    def registers(self) -> int:
        """Registers that a thread may have: 65,536 of an SM are allotted in eights."""
        return 65_536 // (self.ctas_per_sm * self.threads) // 8 * 8

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of W that a CTA has."""
        return ROWS, DEPTH * self.slabs


DequantizeSpec = KernelSpec[DequantizeOperation, DequantizeSchedule]


# ---- The shape of a problem ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class DequantizeShape(Shape):
    """Experts, 1 of a weight that has none, and the rows and columns of each."""

    experts: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class DequantizeProblem:
    """The sizes of one call, and the elements between rows of W and between its experts.

    data_strides    likewise those of codes in rows
    scale_strides   elements between experts, rows and columns of their scales
    """

    experts: int
    n: int
    k: int
    row_stride: int
    expert_stride: int
    data_strides: tuple[int, int] = (0, 0)
    scale_strides: tuple[int, int, int] = (0, 0, 0)

    @property
    def row_blocks(self) -> int:
        """Slabs along N of one expert."""
        return -(-self.n // ROWS)

    @property
    def slabs_of_k(self) -> int:
        """Slabs along K."""
        return -(-self.k // DEPTH)


def work(operation: DequantizeOperation, shape: DequantizeShape) -> Work:
    """The bytes of memory; nothing is multiplied by tensor cores."""
    return Work(0.0, operation.moved(shape.experts, shape.n, shape.k))


# ---- What is legal -------------------------------------------------------------------------------


def operation_reasons(operation: DequantizeOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    row = operation.weight
    if operation.layout == "rows":
        return rules.broken(
            [
                rules.one_of("format of layout rows", row.name, ("e4m3",)),
                rules.one_of("group of layout rows", operation.group, (DEPTH,)),
                rules.one_of("scale of layout rows", operation.scale, ("fp32", "e8m0")),
                rules.one_of("activations of layout rows", operation.activations, ("16-bit",)),
            ]
        )
    formats = [one.name for one in FORMATS.values() if operation.activations in one.orders]
    return rules.broken(
        [
            rules.one_of(f"format for activations {operation.activations}", row.name, formats),
            rules.one_of(
                f"group of {row.name}", operation.group, tuple(one or 0 for one in row.groups)
            ),
            rules.one_of(f"scale of {row.name}", operation.scale, row.scales),
        ]
    )


def schedule_reasons(
    arch: Architecture, operation: DequantizeOperation, schedule: DequantizeSchedule
) -> list[str]:
    """Why the schedule does not fit the operation; empty, as all do."""
    return []
