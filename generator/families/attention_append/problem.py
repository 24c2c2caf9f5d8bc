"""The extents of a call, and how its tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from warploom.generator import configurations
from warploom.generator.families.attention_append.schedule import AttentionAppendOperation
from warploom.generator.shapes import Shape

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
