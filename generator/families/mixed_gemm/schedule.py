"""A product with weights of few bits: which result is computed, and how.

A [M, K] is row-major; W [N, K] lies in slabs (generator/slabs.py), as a torch weight does in rows:
D = epilogue(A W'). C and D are row-major. Kernels compute D' = W A', the 64-row side taking n.
"""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import Element, element
from warploom.generator.epilogue import EpilogueStep
from warploom.generator.families._product import ProductOperation, ProductSchedule, Raster, Store
from warploom.generator.formats import (
    STEPS,
    Activations,
    WeightFormat,
    activations_of,
    weight_format,
)
from warploom.generator.knob import ANY, frozen, knob
from warploom.generator.slabs import DEPTH, SlabLayout
from warploom.generator.specification import KernelSpec
from warploom.generator.wgmma import WARPGROUP, WGMMA_M

Input = Literal["fp16", "bf16", "e4m3", "int8"]
Format = Literal["int4", "uint4", "int8", "e4m3", "mxfp4", "mxfp8", "nvfp4", "int2", "ternary"]
Output = Literal["fp16", "bf16", "fp32", "e4m3", "e5m2", "int8"]
Scales = Literal["fp16", "bf16", "fp32", "e8m0", "e4m3"]
Groups = Literal["none", "rows"]


@frozen
class MixedGemmOperation(ProductOperation):
    """What is computed: D = epilogue(A W^T), where W is scale * (code - zero point).

    Accumulators are fp32. Code minus zero point is exact. For 16-bit activations, `scaled` of
    the schedule says whether scales multiply the accumulators of a group, or the weights, which
    are then rounded. For 8-bit activations the tensor core accumulates each group, int8 in
    int32, and the sums are scaled and added up in fp32; with scales per channel, e4m3 is added
    up in fp32 for each 128 of K, and int8 only after all of K.
    """

    a: Input = knob(name="{}_{}_{}", doc="element type of A [M, K]")
    b: Format = knob(
        name="",
        doc="format of W [N, K]; activations in e4m3 take int4, uint4, e4m3, mxfp4 and mxfp8; "
        "those in int8 take int4, uint4, int8, int2 and ternary, whose codes they "
        "represent exactly",
    )
    d: Output = knob(name="", doc="element type of D [M, N]")
    group: Literal[0, 16, 32, 64, 128] = knob(
        name="g{}_{}",
        doc="values along K that share a scale and a zero point; 0: all of K, one scale per "
        "channel",
    )
    scale: Scales = knob(
        name="", doc="element type of the scales: e8m0 for mxfp4 and mxfp8, e4m3 for nvfp4"
    )
    epilogue: tuple[EpilogueStep, ...] = knob(
        default=(),
        doc="up to 8 steps that are applied to the accumulators, in order, before D is stored",
    )
    groups: Groups = knob(
        default="none",
        name="groups_{}",
        later=True,
        doc="rows: grouped GEMM, as in a mixture of experts: the rows of A [S, K] and of D [S, N] "
        "are divided into groups, which end at offsets in device memory, each with its own "
        "matrix of W [G, N, K]",
    )
    family: Literal["mixed_gemm"] = knob(default="mixed_gemm", doc="the kernel family")

    @property
    def batched(self) -> bool:
        """Groups have operands of their own, as batches have."""
        return self.groups == "rows"

    @property
    def by_rows(self) -> bool:
        """Whether its batches are groups of D's rows, each with a W, wherever these begin."""
        return self.batched

    @property
    def accumulator(self) -> Element:
        """The element type of a tile's sums, which those of groups are added to."""
        return element("fp32")

    @property
    def promoted(self) -> int:
        """The k that the tensor core adds up, where scales do not depend on it: a group, or, of
        8-bit floats, whose accumulators keep few bits, 128 of k at most. 0: all of it.
        """
        return self.group or (DEPTH if element(self.a).is_fp8 else 0)

    @property
    def step(self) -> int:
        """The k of one wgmma, which packed weights are in order for."""
        return STEPS[self.activations]

    @property
    def activations(self) -> Activations:
        """What packed weights are in order for."""
        return activations_of(self.a)

    @property
    def weight(self) -> WeightFormat:
        """The row of W's format."""
        return weight_format(self.b)

    @property
    def slab(self) -> SlabLayout:
        """How W lies; SpecificationError where the format is not packed so."""
        return SlabLayout(self.b, self.group or None, self.scale, self.activations)


@frozen
class MixedGemmSchedule(ProductSchedule):
    """How it is computed."""

    tile: tuple[int, int, int] = knob(
        name="{}x{}x{}",
        doc="output tile of a CTA and k tile of a stage, as (m, n, k): n a multiple of 64, k "
        "of 128, the K of one slab of the weight",
    )
    multiply: Literal["wgmma", "mma"] = knob(
        doc="instruction. wgmma: of a warpgroup, with weights as its register operand; mma: of "
        "a warp (mma.sync), for 8 to 32 rows of A and 16-bit activations",
    )
    scaled: Literal["sums", "weights"] = knob(
        doc="what the scales multiply. sums: the accumulators of a group; weights: the "
        "weights, which are then rounded to the type of A",
    )
    stages: int = knob(
        name="stages{}",
        least=2,
        most=32,
        auto=True,
        follows=ANY,
        doc="k tiles that the shared-memory pipeline holds; auto: as many as fit",
    )
    consumers: Literal[1, 2, 4] = knob(
        default=2, name="consumers{}", doc="consumer warpgroups, which multiply; a producer loads"
    )
    warp_split_k: Literal[1, 2, 4] = knob(
        stored_as="shares",
        default=1,
        name="shares{}",
        doc="consumers that divide the K of a tile: they take the slabs of a stage "
        "alternately, and their accumulators are added in a fixed order; the other "
        "consumers divide N",
    )
    ctas_per_sm: Literal[1, 2] = knob(
        stored_as="blocks",
        default=1,
        name="blocks{}",
        doc="CTAs that fit on an SM at a time. 2: the first weights of the next launch, or of "
        "a second CTA, are loaded while this CTA computes",
    )
    raster: Raster = knob(
        default="along_n",
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
        default="direct",
        doc="how D is stored. tma: by TMA from shared memory; direct: element by element with "
        "bounds checks, for any row stride and address",
    )
    cluster_split_k: Literal[1, 2, 4, 8] = knob(
        stored_as="split",
        default=1,
        name="split{}",
        doc="CTAs of a cluster that divide the K of one tile; each cluster has one tile",
    )
    stream_k: bool = knob(
        default=False,
        doc="divide the K of the tiles that do not fill a wave in equal parts among CTAs, so that "
        "all end together; partial sums go through global memory and are added in a fixed order",
    )
    lookahead: Literal[0, 1, 2] = knob(
        stored_as="ahead",
        default=0,
        name="ahead{}",
        later=True,
        doc="for e4m3 activations and wgmma: parts along M in which the MMAs of a group are "
        "issued, so that the next group is decoded, and the sums of one part are added up, "
        "while others are multiplied; 0: groups are computed one after another",
    )

    @property
    def swap_ab(self) -> bool:
        """The 64-row side of wgmma takes n."""
        return True

    @property
    def sharing(self) -> int:
        """Consumers that share a tile's n."""
        return self.consumers // self.warp_split_k

    @property
    def sources(self) -> int:
        """Consumers, of all blocks of a cluster, that have a part of the sums of the same rows."""
        return self.warp_split_k * self.cluster_split_k

    @property
    def slabs(self) -> int:
        """Slabs of k in one stage."""
        return self.tile[2] // DEPTH

    @property
    def row_blocks(self) -> int:
        """Of 64 columns of D, rows of W, in one tile."""
        return self.tile[1] // WGMMA_M

    @property
    def reallocates(self) -> bool:
        """Whether a warpgroup loads, and leaves its registers to two consumers; else two warps."""
        return self.multiply == "wgmma" and self.consumers == 2 and self.ctas_per_sm == 1

    @property
    def threads(self) -> int:
        """Threads of one block: those that load come last."""
        return WARPGROUP * self.consumers + (WARPGROUP if self.reallocates else 2 * 32)


MixedGemmSpec = KernelSpec[MixedGemmOperation, MixedGemmSchedule]
