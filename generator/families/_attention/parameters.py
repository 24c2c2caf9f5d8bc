"""What kernels of both passes are told of lengths, the mask and scores."""

from __future__ import annotations

from collections.abc import Callable

from warploom.generator.elements import element
from warploom.generator.families._attention.launch import AtLaunch
from warploom.generator.families._attention.operation import Operation
from warploom.generator.families._attention.problem import AttentionProblem, Strides
from warploom.generator.parameters import Field, int32, int64, pointer, scalar

Attention = Field[AtLaunch]
KEYS_BYTES = 16  # of what is found of a row of a mask of keys

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
DROPOUT = (
    pointer("dropout_state", "int64_t", "[2]: what is drawn for each position follows from it"),
    scalar("keep", "probability that a weight is kept, a multiple of 1 / 65536"),
)
SOFTCAP = scalar("softcap", "that no score gets beyond")


def _strides(name: str, strides: Callable[[AtLaunch], Strides]) -> list[Attention]:
    def one(index: int, axis: str) -> Attention:
        return int64(f"{name}_{axis}", "elements", lambda at: strides(at)[index])

    return [one(index, axis) for index, axis in enumerate(("batch", "head", "row"))]


def further(operation: Operation) -> list[Attention]:
    """The tensors beside q, k and v that scores or their sums depend on."""
    fields: list[Attention] = []
    if operation.sinks != "none":
        kind = element("fp32" if operation.sinks == "fp32" else operation.element).cpp
        fields.append(pointer("sinks", f"const {kind}", "[heads]"))
    if operation.alibi:
        fields += [
            pointer("alibi_slopes", "const float", "[batch, heads], by the stride of batches"),
            int64("alibi_batch", "elements", lambda at: at.problem.alibi_batch),
        ]
    if operation.bias != "none":
        kind = element(operation.bias).cpp
        fields.append(pointer("bias", f"const {kind}", "[batch, head, row, column], by strides"))
        fields += _strides("bias", lambda at: at.problem.strides_bias)
    if operation.masked:
        fields.append(pointer("shown", "const uint8_t", "as bias, by strides", tensor="mask"))
        fields += _strides("shown", lambda at: at.problem.strides_mask)
    if operation.trims:
        fields += keys()
    return fields


def rows_of_keys(problem: AttentionProblem) -> int:
    """How many rows a mask of keys has, which all rows of q have in common; 0: it is of pairs."""
    batch, head, row = problem.strides_mask
    return (problem.batch if batch else 1) * (problem.heads if head else 1) if row == 0 else 0


def keys() -> list[Attention]:
    """What is found of a mask of keys before its tiles are worked on."""

    def steps(at: AtLaunch) -> tuple[int, int]:
        batch, head, _ = at.problem.strides_mask
        return (at.problem.heads if head else 1) if batch else 0, 1 if head else 0

    return [
        pointer("keys", "int4", "[row of the mask]: see find_keys()"),
        int32("keys_rows", "of the mask; 0: it is of pairs", lambda at: rows_of_keys(at.problem)),
        int32("keys_columns", "of the mask", lambda at: at.problem.seq_k),
        int32("keys_batch", "rows of a batch; 0: all have the same", lambda at: steps(at)[0]),
        int32("keys_head", "rows of a head; 0: all have the same", lambda at: steps(at)[1]),
    ]


def lengths(*, packed: bool) -> tuple[Attention, ...]:
    """How many sequences, rows and columns there are, and where lse lies."""
    return _PACKED if packed else _FIXED


def lists(header: str, entry: str, shared: str) -> list[Attention]:
    """What lists the tiles to work on. Headers and entries are C++ types.

    A tile that is walked for has a header and places for entries; `shared` is how its mask lies.
    """
    return [
        pointer("lists", header, "of each tile, what is listed: [batch, head, tile]"),
        pointer("listed", entry, "[batch, head, tile, list_tiles]"),
        pointer("masks", "uint32_t", f"[mask, {shared}]: a bit for every score, 1 where it counts"),
    ]


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
