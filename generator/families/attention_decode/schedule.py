"""How few query rows attend to long keys: the schedule."""

from __future__ import annotations

from typing import Literal

from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.knob import ANY, frozen, knob
from warploom.generator.specification import KernelSpec

WARP, WARP_ROWS = 32, 16  # threads, and rows of q, of one warp: those of mma's m16n8k16


@frozen
class DecodeSchedule:
    """How it is computed."""

    rows: Literal[16, 32, 64] = knob(
        name="{}x{}",
        doc="rows of q that are multiplied together, of all heads that share a KV head: 16 for "
        "each warp",
    )
    keys: Literal[16, 32, 64, 128, 256] = knob(
        name="", doc="keys of a stage of k and of v, which each warp takes in slices of 16"
    )
    stages: int = knob(
        name="stages{}",
        least=2,
        most=32,
        auto=True,
        follows=ANY,
        doc="tiles of k, and of v, that the shared-memory pipeline holds; auto: as many as fit",
    )
    warps: Literal[1, 2, 4, 8] = knob(
        default=8,
        name="warps{}",
        doc="warps that compute; one more loads. Warps of the same rows divide the keys of a tile",
    )
    ctas_per_sm: Literal[1, 2, 3, 4] = knob(
        stored_as="blocks",
        default=1,
        name="blocks{}",
        doc="CTAs that run on an SM at a time; each gets an equal share of all keys",
    )

    cluster: Literal[1, 4, 8] = knob(
        default=1,
        name="cluster{}",
        later=True,
        doc="CTAs of a cluster, which divide the keys of a sequence and KV head and combine "
        "their results through distributed shared memory; 1: all CTAs divide all keys and "
        "combine results through global memory",
    )

    @property
    def tile(self) -> tuple[int, int]:
        """Rows of q, and of k and v, that are multiplied in one step."""
        return (self.rows, self.keys)

    @property
    def row_warps(self) -> int:
        """Warps with rows of their own."""
        return self.rows // WARP_ROWS

    @property
    def key_warps(self) -> int:
        """Warps that share the keys of the same rows."""
        return self.warps // self.row_warps

    @property
    def threads(self) -> int:
        """Threads of one block: the warp that loads comes last."""
        return WARP * (self.warps + 1)


DecodeSpec = KernelSpec[DecodeOperation, DecodeSchedule]
