"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import element
from warploom.generator.epilogue import Function
from warploom.generator.knob import frozen, knob
from warploom.generator.specification import KernelSpec

Activation = Literal["none", Function]

BLOCK = 64  # rows of the weight in one instruction
WORD_K = 64  # columns of the weight whose metadata one word of each of 128 threads holds
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
