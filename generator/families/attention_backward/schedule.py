"""The attention backward as a user names it: the operation and the schedule.

q, o, do and dq [batch, heads, seq_q, dim], k, v, dk and dv [batch, kv_heads, seq_k, dim]: views
with any strides whose last dimension is contiguous. Query head h attends to kv head
h / (heads / kv_heads), whose gradients are summed over its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.generator.families._attention.operation import Dim
from warploom.generator.specification import KernelSpec
from warploom.generator.wgmma import WARPGROUP, WGMMA_M


@dataclass(frozen=True, slots=True)
class AttentionBackwardOperation:
    """What is computed: dq, dk and dv of o = softmax(scale q k^T) v, from do and the forward's lse.

    element         of all tensors; sums are fp32
    dim             of a head; a kernel serves any multiple of 8 up to it
    mask            none; causal: column <= row + right; window: row - left <= column <= row + right
    softcap         s = softcap * tanh(s / softcap) before the softmax
    lengths         fixed: every sequence is seq_q by seq_k; packed: cu_seqlens_q, cu_seqlens_k say
    deterministic   dq is summed in an order that does not change from run to run
    family          which kernels these are
    """

    element: Literal["fp16", "bf16"]
    dim: Dim
    mask: Literal["none", "causal", "window"] = "none"
    softcap: bool = False
    lengths: Literal["fixed", "packed"] = "fixed"
    deterministic: bool = False
    family: Literal["attention_backward"] = "attention_backward"

    @property
    def tokens(self) -> tuple[str, ...]:
        """The operation in a kernel's name."""
        softcap = ("softcap",) if self.softcap else ()
        deterministic = ("deterministic",) if self.deterministic else ()
        return (
            self.element,
            f"dim{self.dim}",
            self.mask,
            *softcap,
            self.lengths,
            *deterministic,
        )


@dataclass(frozen=True, slots=True)
class AttentionBackwardSchedule:
    """How it is computed.

    q_tile      rows of q and do in one step
    kv_tile     rows of k and v of one block, or of two that share rows; each has a consumer
                warpgroup for every 64 of them, beside one producer
    stages      tiles of q, and of do, in flight
    overlap     a warpgroup's own products run under its arithmetic: the next scores, dp, dv
    accumulate  how a step's dq is added to the sums in global memory: bulk, by TMA from shared
                memory; direct, from registers
    cluster     blocks that share out the query heads of a kv head, and sum dk and dv through
                distributed shared memory
    share       how two blocks share a kv tile of a head of more than 128: columns, each has all its
                scores, and half the columns of the gradients; rows, each has 64 rows of k and v,
                and they exchange ds for dq, of which each adds half the columns
    single_do   of do only one stage, which is let go earlier in a step than that of q
    held        how much of v a warpgroup has in registers, so that dp is multiplied from there
    """

    q_tile: int
    kv_tile: Literal[64, 128]
    stages: int = 2
    overlap: bool = True
    accumulate: Literal["bulk", "direct"] = "bulk"
    cluster: Literal[1, 2, 4, 8] = 1
    share: Literal["columns", "rows"] = "columns"
    single_do: bool = False
    held: Literal["none", "half", "all"] = "none"

    @property
    def tokens(self) -> tuple[str, ...]:
        """The schedule in a kernel's name."""
        return (
            f"{self.q_tile}x{self.kv_tile}",
            f"stages{self.stages}",
            *(("single_do",) if self.single_do else ()),
            *((f"cluster{self.cluster}",) if self.cluster > 1 else ()),
            *(("rows",) if self.share == "rows" else ()),
            *(("overlap",) if self.overlap else ()),
            *((f"held_{self.held}",) if self.held != "none" else ()),
            self.accumulate,
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
        return 2 if self.share == "rows" else self.cluster

    @property
    def threads(self) -> int:
        """Threads of one block of the main kernel."""
        return WARPGROUP * (1 + self.warpgroups)


AttentionBackwardSpec = KernelSpec[AttentionBackwardOperation, AttentionBackwardSchedule]
