"""What is computed and how (fields of YAML, of names and of a search), and what of it is legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from warploom.generator import configurations, rules
from warploom.generator.architectures import Architecture
from warploom.generator.elements import element
from warploom.generator.knob import frozen, knob
from warploom.generator.shapes import Shape
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


# ---- The shape of a problem ----------------------------------------------------------------------

Steps = tuple[int, int, int]  # elements from one row to the next, along each of three dimensions
NONE: Steps = (0, 0, 0)  # of a tensor that there is not


@dataclass(frozen=True, slots=True, order=True)
class AttentionAppendShape(Shape):
    """New tokens of all sequences, heads of k and v, and of q where it is turned too."""

    optional: ClassVar[frozenset[str]] = frozenset({"heads"})

    tokens: int
    kv_heads: int
    heads: int = 0


def cells(
    operation: AttentionAppendOperation, model: str | None, rows: Sequence[int]
) -> list[AttentionAppendShape]:
    """One new token of each of these numbers of sequences: what a model runs while it generates."""
    return [
        AttentionAppendShape(batch, one["kv_heads"], one["heads"] if operation.queries else 0)
        for one in configurations.served(model)
        if one["dim"] == operation.dim
        for batch in rows or one["batch"]
    ]


@dataclass(frozen=True, slots=True)
class AttentionAppendProblem:
    """The extents of one call, and where its rows lie.

    tokens      that are looked at: batch times seq or seq_q, whichever is more, or those packed
    seq, seq_q  new rows of k and v of a sequence, and of q; 0 where they are packed
    pages       of the caches, each of `page` rows; without a table, one for each sequence
    columns     pages that a sequence may have; table_step from one sequence's to the next
    positions   rows of cos and sin; rotary: numbers of a row that are turned, the first ones
    head_step   elements from one head's scale to the next, where scales are given; 0: one for all
    steps       of k, v, q and what becomes of it: sequence, head, token (0 of sequence where they
                are packed); of caches and of scales beside them: page, head, row
    """

    batch: int
    kv_heads: int
    heads: int
    tokens: int
    seq: int
    seq_q: int
    pages: int
    page: int
    columns: int
    steps_k: Steps
    steps_v: Steps
    steps_k_cache: Steps
    steps_v_cache: Steps
    steps_q: Steps = NONE
    steps_out: Steps = NONE
    steps_scale_k: Steps = NONE
    steps_scale_v: Steps = NONE
    step_cos: int = 0
    step_sin: int = 0
    table_step: int = 0
    head_step: int = 0
    positions: int = 0
    rotary: int = 0

    @property
    def rows(self) -> int:
        """Of one token: its heads of k, of v and of q."""
        return 2 * self.kv_heads + self.heads


# ---- What is legal -------------------------------------------------------------------------------


def operation_reasons(operation: AttentionAppendOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    found = [rules.multiple_of("dim", operation.dim, 2 * VALUES)]
    if operation.cache == "same" and operation.scales != "none":
        found.append(f"scales {operation.scales} of cache same: must be none, or cache of 8 bits")
    if operation.cache == "int8" and operation.scales == "none":
        found.append("scales none of cache int8: must be head or token, as int8 is whole numbers")
    if operation.rotary == "none" and operation.queries:
        found.append("queries without rotary: must be with rotary, for q is not cached")
    if operation.rotary == "none" and operation.table != "fp32":
        found.append("table same without rotary: must be fp32, its default, for there is none")
    return rules.broken(found)


def schedule_reasons(
    arch: Architecture, operation: AttentionAppendOperation, schedule: AttentionAppendSchedule
) -> list[str]:
    """Why the schedule does not fit the operation: every one does."""
    return []
