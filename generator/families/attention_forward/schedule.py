"""Attention as a user names it: the operation (which result) and the schedule (how it is computed).

q [batch, heads, seq_q, dim], k and v [batch, kv_heads, seq_k, dim], o as q: views with any strides
whose last dimension is contiguous. Query head h attends to kv head h / (heads / kv_heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.generator.families._attention.operation import Dim
from warploom.generator.specification import KernelSpec
from warploom.generator.wgmma import WARPGROUP, WGMMA_M


@dataclass(frozen=True, slots=True)
class AttentionOperation:
    """What is computed: o = softmax(scale q k^T) v by rows, and lse = log(sum(exp(scale q k^T))).

    element   of q, k, v and o; sums are fp32
    dim       of a head; a kernel serves any multiple of 8 up to it
    mask      none; causal: column <= row + right; window: row - left <= column <= row + right
    softcap   s = softcap * tanh(s / softcap) before the softmax
    lengths   fixed: every sequence is seq_q by seq_k; packed: cu_seqlens_q and cu_seqlens_k say
    family    which kernels these are
    """

    element: Literal["fp16", "bf16"]
    dim: Dim
    mask: Literal["none", "causal", "window"] = "none"
    softcap: bool = False
    lengths: Literal["fixed", "packed"] = "fixed"
    family: Literal["attention_forward"] = "attention_forward"

    @property
    def tokens(self) -> tuple[str, ...]:
        """The operation in a kernel's name."""
        softcap = ("softcap",) if self.softcap else ()
        return (self.element, f"dim{self.dim}", self.mask, *softcap, self.lengths)


@dataclass(frozen=True, slots=True)
class AttentionSchedule:
    """How it is computed.

    q_tile      rows of q of one block: 64 for each consumer warpgroup, beside one producer
    kv_tile     rows of k and v in one step
    stages      tiles of k, and of v, in flight
    overlap     the softmax of one step runs under the products of the step before
    pingpong    the warpgroups take turns at the tensor core: one's softmax under another's products
    scheduler   single: a block per tile; static: persistent blocks, tiles dealt in advance;
                dynamic: persistent blocks, each takes its next tile from a counter
    rescale     always, or where it is needed: a warp leaves its output as it is where no maximum of
                its rows grew by more than a factor of 2^8 in the weights
    """

    q_tile: Literal[64, 128, 192]
    kv_tile: int
    stages: int = 2
    overlap: bool = True
    pingpong: bool = True
    scheduler: Literal["single", "static", "dynamic"] = "static"
    rescale: Literal["always", "needed"] = "always"

    @property
    def tokens(self) -> tuple[str, ...]:
        """The schedule in a kernel's name."""
        return (
            f"{self.q_tile}x{self.kv_tile}",
            f"stages{self.stages}",
            *(("overlap",) if self.overlap else ()),
            *(("pingpong",) if self.pingpong else ()),
            self.scheduler,
            *(("rescale_needed",) if self.rescale == "needed" else ()),
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
