"""Attention as a user names it: the operation (which result) and the schedule (how it is computed).

q [batch, heads, seq_q, dim], k and v [batch, kv_heads, seq_k, dim], o as q: views with any strides
whose last dimension is contiguous; that of v and o may be of another size, dim_v.
Query head h attends to kv head h / (heads / kv_heads).
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
    """What is computed: by rows, o = softmax(s) v and lse = log(sum(exp(s))) of s = scale q k^T."""

    family: Literal["attention_forward"] = knob(
        default="attention_forward", doc="which kernels these are"
    )
    scores: Literal["same", "e4m3", "int8"] = knob(
        default="same",
        name="scores_{}",
        later=True,
        doc="of which type q and k are, that scores are products of; same: of `element`",
    )
    weights: Literal["same", "e4m3"] = knob(
        default="same",
        name="weights_{}",
        later=True,
        doc="of which type the softmax's weights and v are; e4m3: v lies dim-major, its keys "
        "permuted within 16; same: of `element`",
    )
    sums: Literal["promoted", "fast"] = knob(
        default="promoted",
        name="sums_{}",
        later=True,
        doc="of weights of e4m3 with v; promoted: those of a kv tile are added up in fp32, since "
        "the tensor core's own sums of 8-bit products have 13 bits; fast: all are left to it",
    )
    scales: Literal["heads", "blocks"] = knob(
        default="heads",
        name="scales_{}",
        later=True,
        doc="of q and k of 8 bits; heads: one of each kv head; blocks: one of each row of q and of "
        "each 128 keys. v of e4m3 has one of each kv head",
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
