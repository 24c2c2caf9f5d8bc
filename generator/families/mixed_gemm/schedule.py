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
        doc="(m, n, k) of one block and stage: n is a multiple of 64, k of 128, that of a slab",
    )
    multiply: Literal["wgmma", "mma"] = knob(
        doc="wgmma: by a warpgroup, weights from registers; mma: by each warp, for 8 to 32 rows of "
        "A and activations of 16 bits",
    )
    scaled: Literal["sums", "weights"] = knob(
        doc="what scales are applied to: sums of a group, or weights, which are then rounded to "
        "the type of A",
    )
    stages: int = knob(
        name="stages{}",
        least=2,
        most=32,
        auto=True,
        follows=ANY,
        doc="k tiles in flight; auto: as many as fit",
    )
    consumers: Literal[1, 2, 4] = knob(
        default=2, name="consumers{}", doc="warpgroups that multiply, beside what loads"
    )
    warp_split_k: Literal[1, 2, 4] = knob(
        stored_as="shares",
        default=1,
        name="shares{}",
        doc="consumers that share a tile's k: each takes every so-manieth slab of a stage, and "
        "their sums are added up in one order; the others share its n",
    )
    ctas_per_sm: Literal[1, 2] = knob(
        stored_as="blocks",
        default=1,
        name="blocks{}",
        doc="for how many blocks a multiprocessor has room: with 2, the first weights of the next "
        "launch arrive under this one, or of as many blocks more",
    )
    raster: Raster = knob(
        default="along_n",
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
        default="direct",
        doc="tma: staged through shared memory; direct: predicated, one element at a time, for any "
        "pitch and address",
    )
    cluster_split_k: Literal[1, 2, 4, 8] = knob(
        stored_as="split",
        default=1,
        name="split{}",
        doc="blocks that share a tile's k, in a cluster of their own, which has one tile",
    )
    stream_k: bool = knob(
        default=False,
        doc="blocks share the k of tiles that do not fill a wave, so that all end together: sums "
        "go through memory, and are added in one order",
    )
    lookahead: Literal[0, 1, 2] = knob(
        stored_as="ahead",
        default=0,
        name="ahead{}",
        later=True,
        doc="where a is e4m3, by wgmma: in how many parts of m a group's products are issued, so "
        "that the next group is decoded, and sums of one part are added up, while others are "
        "multiplied; 0: groups come one after the other",
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
