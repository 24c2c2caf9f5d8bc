"""How a product with weights of few bits is computed: D' = W A', the 64-row side taking n."""

from __future__ import annotations

from typing import Literal

from warploom.generator.families._product import ProductSchedule, Raster, Store
from warploom.generator.families.mixed_gemm.operation import MixedGemmOperation
from warploom.generator.knob import ANY, frozen, knob
from warploom.generator.slabs import DEPTH
from warploom.generator.specification import KernelSpec
from warploom.generator.wgmma import WARPGROUP, WGMMA_M


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
        doc="divide the K of tiles that do not fill a wave evenly among CTAs, so that all end "
        "together; partial sums go through global memory and are added in a fixed order",
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
