"""Attention as a user names it: the operation (which result) and the schedule (how it is computed).

q [batch, heads, seq_q, dim], k and v [batch, kv_heads, seq_k, dim], o as q: views with any strides
whose last dimension is contiguous; that of v and o may be of another size, dim_v. Query head h
attends to kv head h / (heads / kv_heads).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from warploom.generator.elements import Element, element
from warploom.generator.families._attention.operation import Operation
from warploom.generator.knob import ANY, frozen, knob
from warploom.generator.specification import KernelSpec
from warploom.generator.wgmma import WARPGROUP, WGMMA_M


@frozen
class AttentionOperation(Operation):
    """What is computed: for each row, o = softmax(s) v and lse = log(sum(exp(s))) of the scores s =
    scale q k^T.
    """

    family: Literal["attention_forward"] = knob(
        default="attention_forward", doc="the kernel family"
    )
    scores: Literal["same", "e4m3", "int8"] = knob(
        default="same",
        name="scores_{}",
        later=True,
        doc="element type of q and k; same: that of `element`",
    )
    weights: Literal["same", "e4m3"] = knob(
        default="same",
        name="weights_{}",
        later=True,
        doc="element type of v, and of the softmax's weights when they are multiplied by v; "
        "same: that of `element`. An e4m3 v is stored with its keys contiguous (V^T), "
        "permuted within each 16",
    )
    sums: Literal["promoted", "fast"] = knob(
        default="promoted",
        name="sums_{}",
        later=True,
        doc="accumulation of e4m3 weights times v. promoted (two-level accumulation): the sums "
        "of each KV tile are added up in fp32, since the tensor core accumulates fp8 with "
        "14 bits; fast: the tensor core accumulates all of it",
    )
    scales: Literal["heads", "blocks"] = knob(
        default="heads",
        name="scales_{}",
        later=True,
        doc="scales of 8-bit q and k. heads: one for each KV head; blocks: one for each row of "
        "q, and for each 128 keys. An e4m3 v has one for each KV head",
    )

    @property
    def eight(self) -> bool:
        """Whether q and k are of 8 bits."""
        return self.scores != "same"

    @property
    def promoted(self) -> bool:
        """Whether a kv tile's products with v are summed by themselves before fp32 has them."""
        return self.weights != "same" and self.sums == "promoted"

    def element_of(self, tensor: str) -> Element:
        """The type of an operand."""
        kinds = {"q": self.scores, "k": self.scores, "v": self.weights}
        kind = kinds.get(tensor, "same")
        return element(self.element if kind == "same" else kind)

    if TYPE_CHECKING:

        def __init__(self, *values: Any, **fields: Any) -> None: ...


@frozen
class AttentionSchedule:
    """How it is computed."""

    q_tile: Literal[64, 128, 192] = knob(
        name="{}x{}",
        doc="rows of q of a CTA: 64 for each consumer warpgroup; one more warpgroup is the "
        "producer",
    )
    kv_tile: int = knob(name="", doc="rows of k and v in each step")
    stages: int = knob(
        default=2,
        name="stages{}",
        least=1,
        most=8,
        follows=ANY,
        doc="tiles of k, and of v, that the shared-memory pipeline holds",
    )
    overlap: bool = knob(
        default=True, doc="overlap the softmax of a step with the MMAs of the previous step"
    )
    pingpong: bool = knob(
        default=True,
        follows="q_tile",
        doc="consumer warpgroups use the tensor core alternately: the softmax of one overlaps "
        "with the MMAs of the other",
    )
    scheduler: Literal["single", "static", "dynamic"] = knob(
        default="static",
        doc="tile scheduler. single: one CTA for each tile; static: persistent CTAs, whose "
        "tiles are assigned in advance; dynamic: persistent CTAs, each of which takes its "
        "next tile from an atomic counter",
    )
    rescale: Literal["always", "needed"] = knob(
        default="always",
        name="rescale_{}",
        doc="when the output accumulators are rescaled. always: in each step; needed (lazy "
        "rescale): a warp skips it unless a row's maximum has grown so much that weights "
        "would exceed 2^8",
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
