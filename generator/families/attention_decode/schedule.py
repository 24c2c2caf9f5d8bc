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
        doc="of q, of all heads that share a kv head, that are multiplied together: 16 of a warp",
    )
    keys: Literal[16, 32, 64, 128, 256] = knob(
        name="", doc="of one stage of k and of v, in slices of 16 for each warp"
    )
    stages: int = knob(
        name="stages{}",
        least=2,
        most=32,
        auto=True,
        follows=ANY,
        doc="tiles of k, and of v, in flight; auto: as many as fit",
    )
    warps: Literal[1, 2, 4, 8] = knob(
        default=8,
        name="warps{}",
        doc="that multiply, beside one that loads: those of the same rows share a tile's keys",
    )
    ctas_per_sm: Literal[1, 2, 3, 4] = knob(
        stored_as="blocks",
        default=1,
        name="blocks{}",
        doc="of a multiprocessor: each has an equal part of all keys",
    )

    cluster: Literal[1, 4, 8] = knob(
        default=1,
        name="cluster{}",
        later=True,
        doc="blocks that share the keys of each item, and add up what they have through each "
        "other's shared memory; 1: all share all keys, and add up through memory",
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
