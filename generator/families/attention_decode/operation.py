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
    """What is computed: o = softmax(s) v and lse = log(sum(exp(s))), by rows of s = scale q k^T.

    Query head h reads KV head h / (heads / kv_heads). The last row of a sequence is at the
    position of its last key: row r of n is at position length - n + r, from which masks count.
    A fully masked row has o = 0 and lse = -inf.
    """

    element: Literal["fp16", "bf16"] = knob(doc="element type of q and o; accumulators are fp32")
    dim: Dim = knob(name="dim{}", doc="head dimension of q, k and v")
    cache: Cache = knob(
        default="same",
        name="cache_{}",
        doc="element type of k and v; same: that of q. 8-bit numbers are converted to the type "
        "of q, which represents them exactly, before they are multiplied",
    )
    scales: Scales = knob(
        default="none",
        name="scales_{}",
        doc="fp32 scales of an 8-bit k, and of v. head: one for each KV head, or one for all; "
        "token: one for each row of each KV head",
    )
    page: Page = knob(
        default=0,
        name="page{}",
        doc="rows of a page of a paged cache, whose pages a page table lists; 0: the cache is "
        "not paged",
    )
    keys: Literal["fixed", "packed"] = knob(
        default="fixed",
        name="k_{}",
        doc="fixed: each sequence has seq_k rows of k and v to itself; packed (varlen): "
        "sequences follow each other, and cu_seqlens_k holds where they begin",
    )
    queries: Literal["fixed", "packed"] = knob(
        default="fixed",
        name="q_{}",
        doc="fixed: each sequence has seq_q rows; packed (varlen): sequences follow each "
        "other, and cu_seqlens_q holds where they begin",
    )
    lengths: bool = knob(
        default=False,
        doc="read the number of keys of each sequence from device memory (cache_seqlens); "
        "false: all rows of the cache are keys",
    )
    starts: bool = knob(
        default=False,
        doc="read the first key of each sequence from device memory (cache_leftpad), as in a "
        "batch that is padded on the left; false: it is key 0",
    )
    mask: Literal["none", "causal", "window"] = knob(
        default="none",
        doc="which keys a row at position t sees. none: all; causal: keys <= t + right; "
        "window: t - left <= keys <= t + right",
    )
    batch_invariant: bool = knob(
        default=False,
        doc="divide the keys of a sequence by its own length only, so that its results are "
        "bitwise identical whatever else is in the batch",
    )
    family: Literal["attention_decode"] = knob(default="attention_decode", doc="the kernel family")

    if TYPE_CHECKING:

        def __init__(self, *values: Any, **fields: Any) -> None: ...

    @property
    def kv(self) -> Element:
        """The row of the cache's element type."""
        return element(self.element if self.cache == "same" else self.cache)
