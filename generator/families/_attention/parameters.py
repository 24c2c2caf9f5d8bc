"""What kernels of both passes are told of lengths, the mask and scores."""

from __future__ import annotations

from warploom.generator.families._attention.launch import AtLaunch
from warploom.generator.parameters import Field, int32, pointer, scalar

Attention = Field[AtLaunch]

_FIXED: tuple[Attention, ...] = (
    pointer("lse", "float", "[batch, heads, seq_q]"),
    int32("heads", "query heads of one batch", lambda at: at.problem.heads),
    int32("seq_q", "rows", lambda at: at.problem.seq_q),
    int32("seq_k", "columns", lambda at: at.problem.seq_k),
)
_PACKED: tuple[Attention, ...] = (
    pointer("lse", "float", "[heads, total_q]"),
    pointer("cu_seqlens_q", "int32_t", "first row of each sequence, and the end"),
    pointer("cu_seqlens_k", "int32_t", "first column of each, and the end"),
    int32("batch", "sequences", lambda at: at.problem.batch),
    int32("total_q", "rows, those after the last sequence too", lambda at: at.problem.total_q),
    int32("total_k", "columns, those after the last sequence too", lambda at: at.problem.total_k),
)
SHARING: Attention = int32(
    "sharing", "query heads of one kv head", lambda at: at.problem.heads // at.problem.kv_heads
)
SCALE = scalar("scale", "of the products")


def lengths(*, packed: bool) -> tuple[Attention, ...]:
    """How many sequences, rows and columns there are, and where lse lies."""
    return _PACKED if packed else _FIXED


def bounds(mask: str, *, packed: bool) -> list[Attention]:
    """What bounds the columns that a row attends to."""
    fields: list[Attention] = []
    if mask == "window":
        left = "row r sees no column before r - left"
        fields.append(int32("left", left, lambda at: at.problem.left))
    if mask != "none":
        right = "row r sees no column after r + right"
        fields.append(int32("right", right, lambda at: at.problem.right))
    if mask != "none" and packed:
        last = "r counts so that the last is seq_k - 1"
        fields.append(int32("bottom_right", last, lambda at: int(at.problem.bottom_right)))
    return fields
