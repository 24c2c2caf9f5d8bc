"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import element
from warploom.generator.knob import frozen, knob
from warploom.generator.specification import KernelSpec

VALUES = 8  # that a thread moves at once, of each half of its part of a row: 16 bytes


@frozen
class AttentionAppendOperation:
    """What is computed: new rows of k and v, written into caches. Arithmetic is fp32."""

    element: Literal["fp16", "bf16"] = knob(doc="element type of k, v and q")
    dim: int = knob(name="d{}", least=16, most=512, doc="elements of a row, a multiple of 16")
    cache: Literal["same", "e4m3", "int8"] = knob(
        default="same", doc="element type of both caches; same: that of k"
    )
    scales: Literal["none", "head", "token"] = knob(
        default="none",
        name="scales_{}",
        doc="what a cached number is multiplied by when it is read: nothing; a scale that is given "
        "for each head, or one for all; one of each token and head, which is the row's largest "
        "number over the type's, and written",
    )
    rotary: Literal["none", "halves", "interleaved"] = knob(
        default="none",
        name="rotary_{}",
        doc="which numbers of k and q are turned together: those half of the turned ones apart, or "
        "neighbours",
    )
    table: Literal["fp32", "same"] = knob(
        default="fp32", name="table_{}", doc="element type of cos and sin; same: that of k"
    )
    queries: bool = knob(default=False, doc="rows of q are turned too, and written apart")
    packed: bool = knob(default=False, doc="sequences have their own numbers of new rows")
    paged: bool = knob(default=False, doc="a table says which page of the caches has which rows")
    family: Literal["attention_append"] = knob(
        default="attention_append", doc="which kernels these are"
    )

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
    """How it is computed: a block has rows of one token, each shared by some threads of a warp."""

    threads: Literal[64, 128, 256, 512] = knob(
        name="threads{}", doc="of one block, at most: a token of fewer rows has smaller blocks"
    )

    @property
    def tile(self) -> tuple[int]:
        """Threads of one block."""
        return (self.threads,)


AttentionAppendSpec = KernelSpec[AttentionAppendOperation, AttentionAppendSchedule]
