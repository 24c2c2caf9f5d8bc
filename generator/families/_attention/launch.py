"""Both passes at launch: their tensor maps, and the parameters for lengths, the mask and scores."""

from __future__ import annotations

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator import launches
from warploom.generator.families._attention.layout import Boxes
from warploom.generator.families._attention.operation import Operation
from warploom.generator.families._attention.problem import BACK, AttentionProblem, Strides
from warploom.generator.parameters import Field, int32, pointer, scalar
from warploom.generator.specification import ScheduleT
from warploom.generator.tensor_maps import TensorMap

_KEYS = ("k", "v", "dk", "dv")  # laid out by kv heads, and columns
_VALUES = ("v", "do", "dv")  # of the head dimension of v

OperationT = TypeVar("OperationT", bound=Operation, covariant=True, default=Operation)
ProblemT = TypeVar("ProblemT", bound=AttentionProblem, covariant=True, default=AttentionProblem)


class AtLaunch(launches.AtLaunch[OperationT, ScheduleT, ProblemT]):
    """What a pass's parameters are functions of."""

    @property
    def layout(self) -> Boxes:
        """Where everything of one block lies."""
        raise NotImplementedError

    @property
    def packed(self) -> bool:
        """Whether sequences lie one after the other."""
        return self.operation.lengths == "packed"

    def strides(self, tensor: str) -> Strides:
        """The strides of a tensor, of (batch, head, seq)."""
        found: Strides = getattr(self.problem, f"strides_{tensor}")
        return found

    def tensor_map(self, tensor: str, rows: int) -> TensorMap:
        """The map of one of q, k, v, do, dk and dv, in boxes of `rows`.

        Packed, a box begins with any row of any sequence: lengths_packed.cuh.jinja in
        templates/_attention says how.
        """
        problem, kind = self.problem, self.operation.element_of(tensor)
        of_keys = tensor in _KEYS
        seq = problem.total_k if of_keys else problem.total_q
        heads = problem.kv_heads if of_keys else problem.heads
        dim = (tensor in _VALUES and problem.dim_v) or problem.dim
        batch_stride, head_stride, seq_stride = (s * kind.bytes for s in self.strides(tensor))
        extents: tuple[int, ...] = (dim, seq, heads, problem.batch)
        pitches: tuple[int, ...] = (seq_stride, head_stride, batch_stride)
        if self.packed:
            extents = (dim, rows, heads, BACK - rows + seq + 1, BACK + 1)
            pitches = (seq_stride, head_stride, seq_stride, 2**34 - seq_stride)
        span = self.layout.span_of(tensor)
        return TensorMap(
            tensor=tensor,
            element=kind,
            extents=extents,
            pitches=pitches,
            box=(span // kind.bytes, rows, *(1 for _ in extents[2:])),
            span=span,
        )

    def lengths_counted(self, tile: tuple[int, int]) -> dict[str, int]:
        """The largest numbers that both passes reach in 32 bits: see `limits.refuse_beyond`.

        A row or column may be one of a tile's past the end, and stand beside a bound.
        """
        problem, mask, beside = self.problem, self.operation.mask, sum(tile)
        if self.packed:  # coordinates count from BACK, and no bound of rows or columns is larger
            totals = {"total_q": problem.total_q, "total_k": problem.total_k}
            return {f"{name} {total}": BACK + total + beside for name, total in totals.items()}
        left = problem.left if mask == "window" else 0
        right = problem.right if mask != "none" else 0
        return {
            f"seq_q {problem.seq_q}": problem.seq_q + beside + max(right, -left, 0),
            f"seq_k {problem.seq_k}": problem.seq_k + beside + max(left, -right, 0),
        }


# ---- Parameters ----------------------------------------------------------------------------------

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
SCALE = scalar("scale", "of dot products of q and k")


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
