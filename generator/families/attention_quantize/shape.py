"""The sizes of a call, and how its tensors are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from warploom.generator.families.attention_forward.launch import padded_total
from warploom.generator.families.attention_quantize.schedule import TILE
from warploom.generator.shapes import Shape

Strides = tuple[int, int, int]  # elements from batch to batch, head to head, row to row
NONE: Strides = (0, 0, 0)  # of a tensor that there is not


@dataclass(frozen=True, slots=True, order=True)
class AttentionQuantizeShape(Shape):
    """Batches, heads and rows of q, and of k and v; without q, where v is alone.

    Packed: as many sequences as batches, which have seq_k keys on average.
    """

    optional: ClassVar[frozenset[str]] = frozenset({"heads", "seq_q"})

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int


@dataclass(frozen=True, slots=True)
class AttentionQuantizeProblem:
    """The sizes of one call, and the strides of what it reads and of q and k in 8 bits.

    The transposed v and everything in fp32 is dense. Packed: of one batch with the keys of all
    sequences.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    strides_v: Strides
    strides_q: Strides = NONE
    strides_k: Strides = NONE
    strides_q_out: Strides = NONE
    strides_k_out: Strides = NONE
    sequences: int = 0  # packed

    @property
    def groups(self) -> int:
        """Heads of k and v, of all batches."""
        return self.batch * self.kv_heads

    @property
    def tiles_q(self) -> int:
        """Tiles of rows of q, of one head."""
        return -(-self.seq_q // TILE)

    @property
    def tiles_k(self) -> int:
        """Tiles of keys, of one head; packed sequences begin at tiles of their own."""
        if self.sequences:
            return padded_total(self.seq_k, self.sequences) // TILE
        return -(-self.seq_k // TILE)
