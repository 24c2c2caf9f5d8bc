"""What is computed and how (fields of YAML, of names and of a search), and what of it is legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from warploom.generator import configurations, rules
from warploom.generator.architectures import Architecture
from warploom.generator.elements import Element, element
from warploom.generator.epilogue import Function
from warploom.generator.families._product.cells import layers
from warploom.generator.families.table import Table
from warploom.generator.knob import frozen, knob
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec

Activation = Literal["none", Function]

BLOCK = 64  # rows of the weight in one instruction
WORD_K = 64  # columns of the weight whose metadata one word of each thread holds
WORDS = 128  # of metadata of BLOCK rows and WORD_K columns: one of each thread of a consumer
STAGE_BYTES = 128  # of a row of x in one stage: two instructions
SWIZZLE_SIZE = 8  # rows of tiles in a band of the tile scheduler


@frozen
class SparseGemmOperation:
    """What is computed: y = activation(x W^T + bias), where W [N, K] is 2:4 sparse along K."""

    element: Literal["bf16", "fp16", "e4m3", "int8"] = knob(
        doc="element type of x and W; accumulators are fp32, or int32 for int8"
    )
    bias: bool = knob(default=False, doc="add a vector over the columns of y")
    activation: Activation = knob(
        default="none", name="{}", doc="the function that is applied to each element of y"
    )
    output: Literal["like_x", "bf16", "fp16"] = knob(
        default="like_x",
        name="{}",
        later=True,
        doc="element type of y and bias; like_x: that of x. 8-bit operands require bf16 or fp16",
    )
    scaled: bool = knob(
        default=False,
        later=True,
        doc="multiply the accumulators by fp32 scales, of the rows of x and of the rows of W",
    )
    family: Literal["sparse_gemm"] = knob(default="sparse_gemm", doc="the kernel family")

    @property
    def of_output(self) -> str:
        """The element of y and bias."""
        return self.element if self.output == "like_x" else self.output

    @property
    def accumulator(self) -> Element:
        """The element type that the tensor core accumulates in."""
        return element("int32" if element(self.element).is_integer else "fp32")

    @property
    def tile_k(self) -> int:
        """Columns of the weight in one stage."""
        return STAGE_BYTES // element(self.element).bytes


@frozen
class SparseGemmSchedule:
    """How it is computed. The rows of wgmma are rows of the weight, its columns are tokens."""

    consumers: Literal[1, 2, 3] = knob(
        name="{}x{}x{}", doc="consumer warpgroups, which issue wgmma; one more warpgroup loads"
    )
    blocks: Literal[1, 2] = knob(
        name="", doc="blocks of 64 rows of the weight that each consumer multiplies"
    )
    tokens: Literal[8, 16, 32, 64, 128, 192, 256] = knob(name="", doc="rows of x in a tile")
    stages: int = knob(
        name="stages{}",
        least=2,
        most=16,
        doc="stages of the shared-memory pipeline; each holds 64 of K, or 128 for 8-bit types",
    )
    split_k: int = knob(
        default=1,
        name="split{}",
        least=1,
        most=16,
        later=True,
        doc="CTAs that divide the K of a tile, for few tiles; the last one adds the partial "
        "sums in a fixed order",
    )

    @property
    def rows(self) -> int:
        """Rows of the weight in a tile."""
        return BLOCK * self.consumers * self.blocks

    @property
    def tile(self) -> tuple[int, int, int]:
        """Rows of x, rows of the weight, and columns of a word of metadata."""
        return self.tokens, self.rows, WORD_K

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (1 + self.consumers)

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread that multiplies."""
        return 160 if self.consumers == 3 else 232

    @property
    def producer_registers(self) -> int:
        """Registers of a thread that loads."""
        return 32 if self.consumers == 3 else 40


SparseGemmSpec = KernelSpec[SparseGemmOperation, SparseGemmSchedule]


# ---- The shape of a problem ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class SparseGemmShape(Shape):
    """x [m, k] by W [n, k]: all leading dimensions of x are rows."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class SparseGemmProblem:
    """The extents of one call, and the elements from row to row of x and of y.

    `x_scales` and `weight_scales` are how many scales there are: one, or one for each row.
    """

    m: int
    n: int
    k: int
    x_pitch: int
    y_pitch: int
    x_scales: int = 0
    weight_scales: int = 0


def cells(
    operation: SparseGemmOperation, model: str | None, rows: Sequence[int]
) -> list[SparseGemmShape]:
    """The weights of a model, or those that are measured."""
    listed = configurations.cells()["sparse_gemm"]
    weights = layers(model) if model else listed["weights"]
    return [SparseGemmShape(m, n, k) for n, k in weights for m in rows or listed["m"]]


# ---- Shared memory -------------------------------------------------------------------------------

_ALIGNMENT = 1024  # bytes that swizzles of 128 bytes repeat in
_BARRIERS = 16  # bytes of both barriers of a stage
_WORD = 8  # bytes of metadata of a row of the weight and 64 of its columns
STAGED_PITCH = 144  # bytes between tokens of a tile that is stored: 64 rows, and 16 to part banks


@dataclass(frozen=True, slots=True)
class SparseGemmLayout:
    """What a block has."""

    operation: SparseGemmOperation
    schedule: SparseGemmSchedule

    @property
    def words(self) -> int:
        """Words of metadata of each thread, in 64 rows and a stage."""
        return self.operation.tile_k // WORD_K

    @property
    def chunk(self) -> int:
        """Tokens that are staged at a time."""
        return min(64, self.schedule.tokens)

    @property
    def staged_pitch(self) -> int:
        """Bytes from one token to the next, where a tile is staged to be stored."""
        return STAGED_PITCH

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the launch."""
        schedule = self.schedule
        row = STAGE_BYTES // 2 + self.words * _WORD
        stage = schedule.tokens * STAGE_BYTES + schedule.rows * row + _BARRIERS
        staging = schedule.consumers * self.chunk * STAGED_PITCH
        return -(-(schedule.stages * stage + staging) // _ALIGNMENT) * _ALIGNMENT

    @property
    def registers(self) -> int:
        """What a consumer's thread is expected to hold: sums, and what it needs beside them."""
        return self.schedule.blocks * self.schedule.tokens // 2 + 40


# ---- What is legal -------------------------------------------------------------------------------


def operation_reasons(operation: SparseGemmOperation) -> list[str]:
    """Why there is no such operation; empty when there is."""
    wide = operation.element in ("bf16", "fp16")
    element, output = operation.element, operation.output
    return rules.broken(
        (
            f"output {output}: must be like_x where x has 16 bits, as {element} has"
            if wide and output != "like_x"
            else None,
            f"output like_x: must be bf16 or fp16 where x has 8 bits, as {element} has"
            if not wide and output == "like_x"
            else None,
            f"scaled: must be false where x has 16 bits, as {element} has"
            if wide and operation.scaled
            else None,
        )
    )


def schedule_reasons(
    arch: Architecture, operation: SparseGemmOperation, schedule: SparseGemmSchedule
) -> list[str]:
    """Why the schedule does not fit; empty when it does."""
    layout = SparseGemmLayout(operation, schedule)
    too_tall = f"{schedule.rows} rows of the weight in a tile: a box has at most 256"
    return rules.broken(
        (
            too_tall if schedule.rows > 256 else None,
            rules.fits_shared(layout.shared_bytes, arch),
            rules.fits_registers(layout.registers, schedule.consumer_registers),
        )
    )


# ---- Which schedule a problem gets that nothing was tuned for ------------------------------------


class SparseGemmTable(Table[SparseGemmOperation, SparseGemmSchedule, SparseGemmShape]):
    """Schedules of classes of rows and columns."""

    advice = "convert the operands, or choose another out_dtype"

    def timed_as(self, operation: SparseGemmOperation) -> SparseGemmOperation:
        """bf16, or e4m3 with scales: bytes of an element decide, and epilogues take little."""
        if element(operation.element).bits == 16:
            return SparseGemmOperation("bf16")
        return SparseGemmOperation("e4m3", output="bf16", scaled=True)
