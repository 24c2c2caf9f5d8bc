"""The attention backward as a user names it: the operation and the schedule.

q, o, do and dq [batch, heads, seq_q, dim], k, v, dk and dv [batch, kv_heads, seq_k, dim]: views
with any strides whose last dimension is contiguous. Query head h attends to kv head
h / (heads / kv_heads), whose gradients are summed over its query heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from warploom.generator.families._attention.operation import Operation
from warploom.generator.knob import ANY, frozen, knob
from warploom.generator.specification import KernelSpec
from warploom.generator.wgmma import WARPGROUP, WGMMA_M


@frozen
class AttentionBackwardOperation(Operation):
    """What is computed: dq, dk and dv of o = softmax(scale q k^T) v, from do and the log-sum-exp of
    the forward pass.
    """

    dim_v: Literal[0, 128] = knob(
        default=0,
        name="v{}",
        later=True,
        doc="head dimension of v and of the output; 0, or the value of `dim`: that of q and k",
    )
    deterministic: bool = knob(
        default=False,
        doc="accumulate dq in a fixed order, so that results are bitwise reproducible",
    )
    bias_gradient: bool = knob(
        default=False,
        later=True,
        doc="also write the gradients of the scores, from which that of a bias is computed",
    )
    family: Literal["attention_backward"] = knob(
        default="attention_backward", doc="the kernel family"
    )

    if TYPE_CHECKING:

        def __init__(self, *values: Any, **fields: Any) -> None: ...

    @property
    def trims(self) -> bool:
        """Gradients of scores are written for all tiles: nobody else would write zeros."""
        return self.masked and not self.bias_gradient


@frozen
class AttentionBackwardSchedule:
    """How it is computed."""

    q_tile: int = knob(name="{}x{}", doc="rows of q and do in each step")
    kv_tile: Literal[64, 128] = knob(
        name="",
        doc="rows of k and v of a CTA, or of both CTAs with `cluster_split: rows`; each 64 of "
        "them have a consumer warpgroup, and each CTA one producer warpgroup",
    )
    stages: int = knob(
        default=2,
        name="stages{}",
        least=1,
        most=8,
        follows=ANY,
        doc="tiles of q, and of do, that the shared-memory pipeline holds",
    )
    overlap: bool = knob(
        default=True,
        after="cluster_split",
        doc="overlap a warpgroup's arithmetic with its own MMAs: those of the next scores, of "
        "dp and of dv",
    )
    accumulate: Literal["bulk", "direct"] = knob(
        default="bulk",
        after="v_in_registers",
        doc="how the dq of a step is added to the accumulators in global memory. bulk: by TMA "
        "reductions from shared memory; direct: from registers",
    )
    cluster: Literal[1, 2, 4, 8] = knob(
        default=1,
        name="cluster{}",
        doc="CTAs of a cluster, which divide the query heads of a KV head among them and sum "
        "dk and dv through distributed shared memory",
    )
    cluster_split: Literal["columns", "rows"] = knob(
        stored_as="share",
        default="columns",
        doc="how two CTAs divide a KV tile if the head dimension exceeds 128. columns: each "
        "computes all scores of the tile, and half of the columns of the gradients; rows: "
        "each has 64 rows of k and v, and they exchange ds to compute dq, half of the "
        "columns each",
    )
    single_do: bool = knob(
        default=False,
        after="stages",
        doc="keep a single stage of do, which is released earlier in a step than that of q",
    )
    v_in_registers: Literal["none", "half", "all"] = knob(
        stored_as="held",
        default="none",
        name="held_{}",
        doc="how much of v a warpgroup keeps in registers, as the wgmma operand of dp",
    )

    @property
    def tile(self) -> tuple[int, int]:
        """Rows of q, and of k and v, that are multiplied in one step."""
        return (self.q_tile, self.kv_tile)

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.kv_tile // WGMMA_M

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster of the main kernel."""
        return 2 if self.cluster_split == "rows" else self.cluster

    @property
    def threads(self) -> int:
        """Threads of one block of the main kernel."""
        return WARPGROUP * (1 + self.warpgroups)


AttentionBackwardSpec = KernelSpec[AttentionBackwardOperation, AttentionBackwardSchedule]
