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
Groups = Literal["none", "rows", "k"]
Spans = Literal["any", "narrow", "wide"]

SCALE_BLOCK = 128
"""Of k, and of the rows of a 128x128 block: what one block scale is of."""

SPARSE_BLOCK = 128
"""Rows and columns of a block of a matrix that is sparse by blocks."""

MOST_GROUPS = 1024
"""Groups of a grouped GEMM: a CTA has their ends in shared memory."""


@frozen
class GemmOperation(ProductOperation):
    """What is computed. Accumulation is fp32, or int32 for int8 operands; then the epilogue."""

    a: Input = knob(name="{}|{}_{}_{}", doc="element type of A [M, K]")
    b: Input = knob(name="", doc="element type of B [K, N]: that of A, or both are fp8")
    d: Output = knob(
        name="",
        doc="element type of D [M, N]; int32 is for int8 operands without epilogue",
    )
    layout_a: Layout = knob(
        default="row",
        name="{}_{}",
        doc="row or col: which of A's rows and columns are contiguous; of 8 bits and tf32: row",
    )
    layout_b: Layout = knob(
        default="col",
        name="",
        doc="the same of B; a torch weight [N, K] is a B `col`; of 8 bits and tf32: col",
    )
    epilogue: tuple[EpilogueStep, ...] = knob(
        default=(), after="batched", doc="up to 8 steps between the accumulators and D, in order"
    )
    accumulation: Accumulation = knob(
        default="fast",
        doc="fast: the tensor core adds all products up, of fp8 ones in about 14 bits, of 16-bit "
        "ones truncated at each 16 of k; promoted: sums over 128 of k, or 64 of 16-bit operands, "
        "are added up in fp32 registers",
    )
    batched: bool = knob(
        default=False,
        doc="A [.., M, K] and B [.., K, N], batch by batch; batches of one are repeated",
    )
    family: Literal["gemm"] = knob(default="gemm", doc="always written")
    block_scales: BlockScales = knob(
        default="none",
        later=True,
        doc="row_block: fp8 A has a scale for each 1x128 (of a row, along k), B for each 128x128; "
        "row_row: both have one for each 1x128. They multiply the sums over 128 of k, which takes "
        "accumulation promoted",
    )
    block_scale_a: BlockScale = knob(
        default="fp32",
        name="sa_{}",
        later=True,
        doc="element type of the block scales of A; e8m0 is a power of two, or NaN",
    )
    block_scale_b: BlockScale = knob(
        default="fp32", name="sb_{}", later=True, doc="element type of the block scales of B"
    )
    sparse: Sparse = knob(
        default="none",
        name="sparse_{}",
        later=True,
        doc="the matrix of which only some blocks of 128x128 count, the others being zero: of a or "
        "b, whose k tiles are read from a list, or of d, whose tiles that are not computed are "
        "written as zeros",
    )
    groups: Groups = knob(
        default="none",
        name="groups_{}",
        later=True,
        doc="grouped GEMM, whose groups end at offsets in device memory (batched: true). rows: A "
        "[S, K] and D [S, N] have groups of rows, and B [G, K, N] a matrix for each; k: A [M, S] "
        "and B [S, N] have groups of k, and D [G, M, N] a matrix for each",
    )

    terms: Literal[1, 2, 3, 6] = knob(
        default=1,
        name="terms{}",
        later=True,
        doc="3: A and B are two 16-bit pieces of each value, a high and a low one, in two matrices "
        "side by side along k, and D is the sum of the products but that of the low pieces; 6: "
        "three pieces, and the products of those that are not too low. Takes accumulation promoted",
    )

    spans: Spans = knob(
        default="any",
        name="{}",
        later=True,
        doc="narrow: the launch leaves at once where two fp16 pieces do not hold the values of A "
        "and B, which their splits wrote to device memory; wide: where they do. Takes terms",
    )

    whole_b: bool = knob(
        default=False,
        later=True,
        doc="B is of 16 bits itself and not in pieces: terms 2 or 3 are those of A",
    )

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
        doc="(m, n, k) of one block; k is 128 bytes: 64 for 16-bit operands, 128 for 8-bit "
        "ones, 32 for tf32",
    )
    stages: int = knob(
        name="stages{}",
        after="consumers",
        least=2,
        most=32,
        auto=True,
        follows=ANY,
        doc="k tiles in flight; auto: as many as fit",
    )
    cluster: tuple[int, int] = knob(
        default=(1, 1),
        name="cluster{}x{}",
        doc="blocks along (m, n) that multicast what they share: 1, 2, 4 or 8 each, up to 8 in all",
    )
    consumers: Literal[1, 2] = knob(
        default=2,
        name="consumers{}",
        detail=True,
        follows="kernel_schedule",
        doc="warpgroups that issue wgmma, beside one producer warpgroup that issues TMA",
    )
    raster: Raster = knob(
        default="along_m",
        detail=True,
        doc="the direction in which tiles follow each other in a band of `swizzle_size` tiles",
    )
    swizzle_size: int = knob(
        stored_as="group",
        default=8,
        name="group{}",
        least=1,
        most=1024,
        detail=True,
        doc="how many tiles wide a band is",
    )
    store: Store = knob(
        default="tma",
        doc="tma: staged through shared memory, operands of the epilogue read in pairs; "
        "direct: predicated, one element at a time, for any pitch and address",
    )
    kernel_schedule: Roles = knob(
        stored_as="roles",
        default="cooperative",
        after="",
        doc="cooperative: the consumers share a tile, each taking its share of the rows; "
        "pingpong: each has a tile of its own, one's epilogue under the other's products",
    )
    swap_ab: bool = knob(
        stored_as="swap",
        default=False,
        doc="D' = B' A': the 64-row side of wgmma takes n, and its side of 8 to 256 takes m",
    )
    producer_registers: Literal[24, 40] = knob(
        default=40,
        name="producer{}",
        detail=True,
        follows="kernel_schedule",
        doc="of the producer's threads where there are two consumers, which share what "
        "is left: 232 each beside 40, 240 beside 24",
    )
    l2_promotion: Literal[64, 128, 256] = knob(
        default=256,
        name="l2x{}",
        detail=True,
        doc="bytes that L2 fetches for each of TMA's requests of A and B",
    )
    cluster_split_k: int = knob(
        stored_as="split",
        default=1,
        name="split{}",
        least=1,
        most=8,
        doc="blocks that share a tile's k, in a cluster of their own: each adds up its "
        "part, then finishes an equal share of the tile's columns of wgmma",
    )
    stream_k: bool = knob(
        default=False,
        later=True,
        doc="clusters share the k of tiles that do not fill a wave, so that all end together: "
        "sums go through memory, and are added in one order",
    )
    split_k: int = knob(
        default=1,
        name="splitk{}",
        least=1,
        most=32,
        later=True,
        doc="parts of k that are tiles of their own: their partial sums go through memory, and a "
        "second launch adds them up in one order and has the epilogue",
    )


GemmSpec = KernelSpec[GemmOperation, GemmSchedule]
