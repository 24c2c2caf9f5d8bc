"""Attention as a user names it: the operation (which result) and the schedule (how it is computed).

q [batch, heads, seq_q, dim], k and v [batch, kv_heads, seq_k, dim], o as q: views with any strides
whose last dimension is contiguous. Query head h attends to kv head h / (heads / kv_heads).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from warploom.generator.families._attention.operation import Operation
from warploom.generator.knob import ANY, frozen, knob
from warploom.generator.specification import KernelSpec
from warploom.generator.wgmma import WARPGROUP, WGMMA_M


@frozen
class AttentionOperation(Operation):
    """What is computed: by rows, o = softmax(s) v and lse = log(sum(exp(s))) of s = scale q k^T."""

    family: Literal["attention_forward"] = knob(
        default="attention_forward", doc="which kernels these are"
    )

    if TYPE_CHECKING:

        def __init__(self, *values: Any, **fields: Any) -> None: ...


@frozen
class AttentionSchedule:
    """How it is computed."""

    q_tile: Literal[64, 128, 192] = knob(
        name="{}x{}",
        doc="rows of q of one block: 64 for each consumer warpgroup, beside one producer",
    )
    kv_tile: int = knob(name="", doc="rows of k and v in one step")
    stages: int = knob(
        default=2,
        name="stages{}",
        least=1,
        most=8,
        follows=ANY,
        doc="tiles of k, and of v, in flight",
    )
    overlap: bool = knob(
        default=True, doc="the softmax of one step runs under the products of the step before"
    )
    pingpong: bool = knob(
        default=True,
        follows="q_tile",
        doc="the warpgroups take turns at the tensor core: one's softmax under another's products",
    )
    scheduler: Literal["single", "static", "dynamic"] = knob(
        default="static",
        doc="single: a block per tile; static: persistent blocks, tiles dealt in advance; "
        "dynamic: persistent blocks, each takes its next tile from a counter",
    )
    rescale: Literal["always", "needed"] = knob(
        default="always",
        name="rescale_{}",
        doc="always, or where it is needed: a warp leaves its output as it is where no maximum of "
        "its rows grew by more than a factor of 2^8 in the weights",
    )

    @property
    def tile(self) -> tuple[int, int]:
        """Rows of q, and of k and v, that are multiplied in one step."""
        return (self.q_tile, self.kv_tile)

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.q_tile // WGMMA_M

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return WARPGROUP * (1 + self.warpgroups)


AttentionSpec = KernelSpec[AttentionOperation, AttentionSchedule]
