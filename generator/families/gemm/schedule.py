"""GEMM as a user names it: the operation (which result) and the schedule (how it is computed).

Layouts: `row` and `col` of A [M, K] and of B [K, N]; a torch weight [N, K] is a B `col`. D and C
are row-major.
"""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import Element, element
from warploom.generator.epilogue import EpilogueStep
from warploom.generator.families._product import (
    ProductOperation,
    ProductSchedule,
    Raster,
    Roles,
    Store,
)
from warploom.generator.knob import ANY, frozen, knob
from warploom.generator.specification import KernelSpec

Input = Literal["fp16", "bf16", "tf32", "e4m3", "e5m2", "int8"]
Output = Literal["fp16", "bf16", "fp32", "e4m3", "e5m2", "int8", "int32"]
Accumulation = Literal["fast", "promoted"]
Layout = Literal["row", "col"]
BlockScales = Literal["none", "row_block", "row_row"]
BlockScale = Literal["fp32", "e8m0"]
Sparse = Literal["none", "a", "b", "d"]
Groups = Literal["none", "rows", "masked", "k"]
Spans = Literal["any", "narrow", "wide"]

SCALE_BLOCK = 128
"""Of k, and of the rows of a 128x128 block: what one block scale is of."""

SPARSE_BLOCK = 128
"""Rows and columns of a block of a matrix that is sparse by blocks."""


@frozen
class GemmOperation(ProductOperation):
    """What is computed: D = epilogue(A B). Accumulators are fp32, or int32 for int8 operands."""

    a: Input = knob(name="{}|{}_{}_{}", doc="element type of A [M, K]")
    b: Input = knob(
        name="", doc="element type of B [K, N]: that of A, except that e4m3 and e5m2 may be mixed"
    )
    d: Output = knob(
        name="",
        doc="element type of D [M, N]; int32 requires int8 operands and an empty epilogue",
    )
    layout_a: Layout = knob(
        default="row",
        name="{}_{}",
        doc="memory layout of A: row (each row is contiguous along K) or col (each column is "
        "contiguous along M); 8-bit types and tf32 require row",
    )
    layout_b: Layout = knob(
        default="col",
        name="",
        doc="memory layout of B: row, or col, which is that of a torch weight [N, K] seen as "
        "[K, N]; 8-bit types and tf32 require col",
    )
    epilogue: tuple[EpilogueStep, ...] = knob(
        default=(),
        after="batched",
        doc="up to 8 steps that are applied to the accumulators, in order, before D is stored",
    )
    accumulation: Accumulation = knob(
        default="fast",
        doc="fast: the tensor core accumulates over all of K, fp8 with about 14 bits, and "
        "16-bit types truncated after every 16 of K; promoted (two-level accumulation): "
        "partial sums over 128 of K, or 64 for 16-bit operands, are added up in fp32 "
        "registers",
    )
    batched: bool = knob(
        default=False,
        doc="A is [.., M, K] and B is [.., K, N], multiplied batch by batch; batch dimensions "
        "of size 1 are broadcast",
    )
    family: Literal["gemm"] = knob(default="gemm", doc="the kernel family")
    block_scales: BlockScales = knob(
        default="none",
        later=True,
        doc="scales of fp8 operands. row_block: one for each 1x128 block of A (128 of K in one "
        "row) and for each 128x128 block of B; row_row: one for each 1x128 block of both. "
        "Partial sums over 128 of K are multiplied by them, which requires `accumulation: "
        "promoted`",
    )
    block_scale_a: BlockScale = knob(
        default="fp32",
        name="sa_{}",
        later=True,
        doc="element type of A's block scales; e8m0 holds powers of two, and NaN",
    )
    block_scale_b: BlockScale = knob(
        default="fp32", name="sb_{}", later=True, doc="element type of B's block scales"
    )
    sparse: Sparse = knob(
        default="none",
        name="sparse_{}",
        later=True,
        doc="which matrix has a mask of its blocks of 128x128. a, b: blocks that are not set in "
        "the mask count as zeros and are not read; d: blocks of the result that are not set are "
        "not computed, and zeros are written",
    )
    groups: Groups = knob(
        default="none",
        name="groups_{}",
        later=True,
        doc="grouped GEMM; its groups end at offsets in device memory, and `batched` must be "
        "true. rows: the rows of A [S, K] and of D [S, N] are divided into G groups, each "
        "with its own matrix of B [G, K, N]; masked: A has G groups of M rows each, of which "
        "only the first rows count, and how many these are takes the place of the offsets; k: "
        "the K dimension of A [M, S] and B [S, N] is divided into G groups, each with its own "
        "matrix of D [G, M, N]; groups of k of 8-bit operands begin at multiples of 128",
    )

    terms: Literal[1, 2, 3, 6] = knob(
        default=1,
        name="terms{}",
        later=True,
        doc="how many 16-bit matmuls are summed to emulate fp32. 3: each value of A and B is "
        "split into a high and a low 16-bit piece, stored as two matrices next to each "
        "other along K; all pairs are multiplied except low by low. 6: three pieces, "
        "without the three smallest pairs. Requires `accumulation: promoted`",
    )

    spans: Spans = knob(
        default="any",
        name="{}",
        later=True,
        doc="when a launch that multiplies pieces computes D; otherwise it ends at once. narrow: "
        "if two fp16 pieces hold the values of A and B, as the launches that split them found; "
        "wide: if they do not; any: always. narrow and wide require terms of 3 or 6",
    )

    whole_b: bool = knob(
        default=False,
        later=True,
        doc="B is a 16-bit matrix that is not split; terms is then the number of pieces of A, 2 or "
        "3",
    )

    @property
    def by_rows(self) -> bool:
        """Whether its batches are groups of D's rows, each with a B, wherever these begin."""
        return self.groups in ("rows", "masked")

    @property
    def pieces(self) -> int:
        """Of each value of A, side by side along k."""
        return self.terms if self.whole_b else {1: 1, 2: 2, 3: 2, 6: 3}[self.terms]

    @property
    def pieces_b(self) -> int:
        """Of each value of B, likewise."""
        return 1 if self.whole_b else self.pieces

    @property
    def products(self) -> list[tuple[int, int]]:
        """The pieces of A and of B that are multiplied, 0 being the highest, smallest first."""
        count = self.pieces
        if self.whole_b:
            return [(piece, 0) for piece in reversed(range(count))]
        return [(total - b, b) for total in reversed(range(count)) for b in range(total + 1)]

    def scale_rows(self, operand: Literal["a", "b"]) -> int:
        """Rows of an operand, a and b being [M, K] and [N, K], that share a block scale; 0: none.

        Args:
            operand: a or b.
        """
        if self.block_scales == "none":
            return 0
        return SCALE_BLOCK if operand == "b" and self.block_scales == "row_block" else 1

    @property
    def accumulator(self) -> Element:
        """The element type that the tensor core accumulates in."""
        return element("int32" if element(self.a).is_integer else "fp32")


@frozen
class GemmSchedule(ProductSchedule):
    """How it is computed."""

    tile: tuple[int, int, int] = knob(
        name="{}x{}x{}",
        doc="output tile of a CTA and k tile, as (m, n, k); k is 128 bytes: 64 for 16-bit "
        "operands, 128 for 8-bit ones, 32 for tf32",
    )
    stages: int = knob(
        name="stages{}",
        after="consumers",
        least=2,
        most=32,
        auto=True,
        follows=ANY,
        doc="k tiles that the shared-memory pipeline holds; auto: as many as fit",
    )
    cluster: tuple[int, int] = knob(
        default=(1, 1),
        name="cluster{}x{}",
        doc="cluster shape in CTAs along (m, n), which load the operands they share by TMA "
        "multicast: 1, 2, 4 or 8 each, at most 8 in all",
    )
    consumers: Literal[1, 2] = knob(
        default=2,
        name="consumers{}",
        detail=True,
        follows="kernel_schedule",
        doc="consumer warpgroups, which issue wgmma; one more warpgroup, the producer, issues "
        "TMA loads",
    )
    raster: Raster = knob(
        default="along_m",
        detail=True,
        doc="the direction in which output tiles follow each other within a band of "
        "`swizzle_size` tiles",
    )
    swizzle_size: int = knob(
        stored_as="group",
        default=8,
        name="group{}",
        least=1,
        most=1024,
        detail=True,
        doc="width of a band in tiles; CTAs that run at the same time then share operands in L2",
    )
    store: Store = knob(
        default="tma",
        doc="how D is stored. tma: by TMA from shared memory, and the epilogue reads its "
        "operands in pairs (scattered rows: by threads from shared memory, 16 bytes at a time); "
        "direct: element by element with bounds checks, for any row stride and address",
    )
    kernel_schedule: Roles = knob(
        stored_as="roles",
        default="cooperative",
        after="",
        doc="cooperative: the consumers share an output tile, each computing part of its rows; "
        "pingpong: each consumer has its own output tile, and the epilogue of one overlaps "
        "with the mainloop of the other",
    )
    swap_ab: bool = knob(
        stored_as="swap",
        default=False,
        doc="compute D^T = B^T A^T, so that N is on the 64-row side of wgmma and M on its side "
        "of 8 to 256: for few rows of A",
    )
    producer_registers: Literal[24, 40] = knob(
        default=40,
        name="producer{}",
        detail=True,
        follows="kernel_schedule",
        doc="registers of a producer thread if there are two consumers, whose threads get the "
        "rest: 232 each with 40, 240 with 24",
    )
    l2_promotion: Literal[64, 128, 256] = knob(
        default=256,
        name="l2x{}",
        detail=True,
        doc="bytes that L2 fetches for each TMA request of A and B (TMA's L2 promotion)",
    )
    cluster_split_k: int = knob(
        stored_as="split",
        default=1,
        name="split{}",
        least=1,
        most=8,
        doc="CTAs of a cluster that divide the K of one tile: they exchange partial sums "
        "through distributed shared memory, and each finishes an equal share of the "
        "accumulator's columns",
    )
    stream_k: bool = knob(
        default=False,
        later=True,
        doc="divide the K of tiles that do not fill a wave evenly among clusters, so that all "
        "end together; partial sums go through global memory and are added in a fixed "
        "order",
    )
    split_k: int = knob(
        default=1,
        name="splitk{}",
        least=1,
        most=32,
        later=True,
        doc="parts of K that are computed as separate tiles; their partial sums go through "
        "global memory, and a second launch adds them in a fixed order and runs the "
        "epilogue",
    )


GemmSpec = KernelSpec[GemmOperation, GemmSchedule]
