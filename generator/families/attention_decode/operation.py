"""Attention of few query rows to long keys, as a user names it: which result is computed.

q [batch, heads, seq_q, dim], or packed [total_q, heads, dim], attends to a cache of keys and
values: [batch, kv_heads, seq_k, dim], packed [total_k, kv_heads, dim], or in pages [pages,
kv_heads, page, dim] that a table names. All are views with any strides whose last dimension is
contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from warploom.generator.elements import Element, element
from warploom.generator.families._attention.modifiers import DECODED, declare
from warploom.generator.families._attention.operation import Modified
from warploom.generator.knob import frozen, knob

Dim = Literal[64, 96, 128, 256]
Page = Literal[0, 16, 32, 64, 128, 256]
Cache = Literal["same", "e4m3", "int8"]
Scales = Literal["none", "head", "token"]


@frozen
@declare(DECODED, later=False)  # the fields of modifiers
class DecodeOperation(Modified):
    """What is computed: o = softmax(s) v and lse = log(sum(exp(s))) of s = scale q k^T, by rows.

    Query head h attends to kv head h / (heads / kv_heads). The last row of a sequence stands at its
    last key: row r of n at key length - n + r, which is where bounds count from. A row that attends
    to nothing has o = 0 and lse = -inf.
    """

    element: Literal["fp16", "bf16"] = knob(doc="of q and o; sums are fp32")
    dim: Dim = knob(name="dim{}", doc="of a head, of k and of v")
    cache: Cache = knob(
        default="same",
        name="cache_{}",
        doc="element type of k and v; same: that of q. Those of 8 bits are multiplied as the type "
        "of q, which holds them exactly",
    )
    scales: Scales = knob(
        default="none",
        name="scales_{}",
        doc="fp32 factors of k, and of v: head: of each kv head, or one for all; token: of each "
        "row of a kv head",
    )
    page: Page = knob(
        default=0, name="page{}", doc="rows of a page of the cache, that a table names; 0: no pages"
    )
    keys: Literal["fixed", "packed"] = knob(
        default="fixed",
        name="k_{}",
        doc="fixed: each sequence has rows of its own for seq_k keys; packed: cu_seqlens_k says",
    )
    queries: Literal["fixed", "packed"] = knob(
        default="fixed",
        name="q_{}",
        doc="fixed: each sequence has seq_q rows; packed: cu_seqlens_q says",
    )
    lengths: bool = knob(
        default=False, doc="how many keys of each sequence count is read from memory; else all"
    )
    starts: bool = knob(
        default=False,
        doc="the first key of each sequence that rows see is read from memory, as of a batch that "
        "is padded on the left; else the first",
    )
    mask: Literal["none", "causal", "window"] = knob(
        default="none",
        doc="of a row that stands at key t: none; causal: keys <= t + right; window: keys >= t - "
        "left, too",
    )
    batch_invariant: bool = knob(
        default=False,
        doc="a sequence's keys are cut by its own length alone: no bit depends on the other ones",
    )
    family: Literal["attention_decode"] = knob(
        default="attention_decode", doc="which kernels these are"
    )

    if TYPE_CHECKING:

        def __init__(self, *values: Any, **fields: Any) -> None: ...

    @property
    def kv(self) -> Element:
        """The row of the cache's element type."""
        return element(self.element if self.cache == "same" else self.cache)
