"""What kernels of both passes are told of lengths and the mask."""

from __future__ import annotations

from warploom.generator.families._attention.problem import AttentionProblem
from warploom.generator.launches import Address, Value
from warploom.generator.parameters import Field, Kind

FIXED = (
    Field("lse", Kind.POINTER, "float", "[batch, heads, seq_q]"),
    Field("heads", Kind.INT32, "int32_t", "query heads of one batch"),
    Field("seq_q", Kind.INT32, "int32_t", "rows"),
    Field("seq_k", Kind.INT32, "int32_t", "columns"),
)
PACKED = (
    Field("lse", Kind.POINTER, "float", "[heads, total_q]"),
    Field("cu_seqlens_q", Kind.POINTER, "int32_t", "first row of each sequence, and the end"),
    Field("cu_seqlens_k", Kind.POINTER, "int32_t", "first column of each, and the end"),
    Field("batch", Kind.INT32, "int32_t", "sequences"),
    Field("total_q", Kind.INT32, "int32_t", "rows, those after the last sequence too"),
    Field("total_k", Kind.INT32, "int32_t", "columns, those after the last sequence too"),
)
SOFTCAP = Field("softcap", Kind.FLOAT, "float", "that no score gets beyond")
_LEFT = Field("left", Kind.INT32, "int32_t", "row r sees no column before r - left")
_RIGHT = Field("right", Kind.INT32, "int32_t", "row r sees no column after r + right")
_BOTTOM_RIGHT = Field(
    "bottom_right", Kind.INT32, "int32_t", "r counts so that the last is seq_k - 1"
)


def bounds(mask: str, *, packed: bool) -> list[Field]:
    """What bounds the columns that a row attends to."""
    fields = [_LEFT] if mask == "window" else []
    if mask != "none":
        fields.append(_RIGHT)
    if mask != "none" and packed:
        fields.append(_BOTTOM_RIGHT)
    return fields


def length_values(problem: AttentionProblem, *, packed: bool) -> dict[str, Value]:
    """What both passes are told of lengths: FIXED or PACKED."""
    if packed:
        offsets: dict[str, Value]
        offsets = {name: Address(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        totals = {"total_q": problem.total_q, "total_k": problem.total_k}
        return {**offsets, "batch": problem.batch, **totals}
    return {"heads": problem.heads, "seq_q": problem.seq_q, "seq_k": problem.seq_k}


def bound_values(mask: str, problem: AttentionProblem, *, packed: bool) -> dict[str, Value]:
    """What both passes are told of the mask: `bounds`."""
    values: dict[str, Value] = {"left": problem.left} if mask == "window" else {}
    if mask != "none":
        values["right"] = problem.right
    if mask != "none" and packed:
        values["bottom_right"] = int(problem.bottom_right)
    return values
