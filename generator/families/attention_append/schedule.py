"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import element
from warploom.generator.knob import frozen, knob
from warploom.generator.specification import KernelSpec

VALUES = 8  # that a thread moves at once, of each half of its part of a row: 16 bytes


@frozen
class AttentionAppendOperation:
    """What is computed: new rows of k and v are written into KV caches, rotated and quantized where
    fields say so. Arithmetic is fp32.
    """

    element: Literal["fp16", "bf16"] = knob(doc="element type of k, v and q")
    dim: int = knob(name="d{}", least=16, most=512, doc="elements of a row, a multiple of 16")
    cache: Literal["same", "e4m3", "int8"] = knob(
        default="same", doc="element type of both caches; same: that of k"
    )
    scales: Literal["none", "head", "token"] = knob(
        default="none",
        name="scales_{}",
        doc="the scale of a cached number, by which it is multiplied when it is read. none: 1; "
        "head: the caller gives one for each head, or one for all; token: one for each "
        "token and head is computed (the largest magnitude of its row / the largest number "
        "of the type) and written",
    )
    rotary: Literal["none", "halves", "interleaved"] = knob(
        default="none",
        name="rotary_{}",
        doc="rotary position embedding (RoPE) of k and q. halves (neox): element i is rotated "
        "with the element half of the rotated dimensions later; interleaved (GPT-J): with "
        "its neighbour",
    )
    table: Literal["fp32", "same"] = knob(
        default="fp32",
        name="table_{}",
        doc="element type of the tables cos and sin; same: that of k",
    )
    queries: bool = knob(
        default=False, doc="also rotate the rows of q, and write them to a tensor of their own"
    )
    packed: bool = knob(default=False, doc="varlen: sequences have different numbers of new rows")
    paged: bool = knob(
        default=False, doc="caches are paged: a page table says which page holds which rows"
    )
    family: Literal["attention_append"] = knob(default="attention_append", doc="the kernel family")

    @property
    def cached(self) -> str:
        """The element type of the caches."""
        return self.element if self.cache == "same" else self.cache

    @property
    def angle(self) -> str:
        """The element type of cos and sin."""
        return self.element if self.table == "same" else self.table

    @property
    def lanes(self) -> int:
        """Threads that share a row: a power of two, of which the last may have nothing."""
        return 1 << (self.dim // (2 * VALUES) - 1).bit_length()

    def token_bytes(self, kv_heads: int, heads: int) -> int:
        """Bytes that are moved for one new token, at least."""
        read, written = element(self.element).bytes, element(self.cached).bytes
        return self.dim * (2 * kv_heads * (read + written) + 2 * heads * read)


@frozen
class AttentionAppendSchedule:
    """How it is computed: a CTA writes rows of one token, each by some threads of a warp."""

    threads: Literal[64, 128, 256, 512] = knob(
        name="threads{}", doc="threads of a CTA, at most; tokens with few rows have smaller CTAs"
    )

    @property
    def tile(self) -> tuple[int]:
        """Threads of one block."""
        return (self.threads,)


AttentionAppendSpec = KernelSpec[AttentionAppendOperation, AttentionAppendSchedule]
