"""One call: extents, strides and bounds; and the shape that its time depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warploom.generator import configurations
from warploom.generator.families._attention.problem import UNBOUNDED, Strides
from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.shapes import Shape


@dataclass(frozen=True, slots=True, order=True)
class DecodeShape(Shape):
    """Sequences of up to seq_q rows of q and up to seq_k keys, whatever their lengths are."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int

    @property
    def rows(self) -> int:
        """Rows of q that share a kv head's keys."""
        return self.heads // max(1, self.kv_heads) * self.seq_q

    @property
    def compared(self) -> tuple[int, ...]:
        """How many heads share keys, and how many are read, decide; not how heads are counted."""
        return (self.batch * self.kv_heads, self.rows, self.seq_k)


def cells(operation: DecodeOperation, model: str | None, rows: Sequence[int]) -> list[DecodeShape]:
    """One new row of each of these numbers of sequences: what a model runs while it generates."""
    if operation.queries == "packed" or operation.keys == "packed":
        return []
    return [
        DecodeShape(batch, one["heads"], one["kv_heads"], 1, keys)
        for one in configurations.served(model)
        if one["dim"] == operation.dim
        for batch in rows or one["batch"]
        for keys in one["keys"]
    ]


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """The extents of one call, and where its tensors lie: everything in elements.

    batch       sequences
    seq_q       rows of each; packed: the most that one has (max_seqlen_q)
    seq_k       keys that each may have: of fixed keys all rows, of pages those of a table's row,
                packed: the most that one has (max_seqlen_k)
    entries     of the cache: batch, or pages; packed: 1
    entry_rows  rows of one of these: seq_k, or a page's; packed: all of them
    strides     q and o: of (batch, head, row); k, v and their scales: of (entry, head, row).
                Packed: (0, head, token)
    table_stride  from one sequence's row of the page table to the next; 0 without pages
    left, right   what a row sees beside the key that it stands at; UNBOUNDED: all
    head_scale_stride  1: a scale of each kv head; 0: one for all
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    entries: int
    entry_rows: int
    strides_q: Strides
    strides_o: Strides
    strides_k: Strides
    strides_v: Strides
    total_q: int = 0  # packed: rows of all sequences
    table_stride: int = 0
    strides_scale_k: Strides = (0, 0, 0)  # of scales of tokens
    strides_scale_v: Strides = (0, 0, 0)
    head_scale_stride: int = 0
    left: int = UNBOUNDED
    right: int = UNBOUNDED

    @property
    def rows(self) -> int:
        """Rows of q that share a kv head's keys, at most."""
        return self.heads // self.kv_heads * self.seq_q

    @property
    def shape(self) -> DecodeShape:
        """What its time depends on."""
        return DecodeShape(self.batch, self.heads, self.kv_heads, self.seq_q, self.seq_k)
