"""What the parameters of both passes are functions of, and their tensor maps."""

from __future__ import annotations

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator import launches
from warploom.generator.families._attention.layout import Boxes
from warploom.generator.families._attention.operation import Operation
from warploom.generator.families._attention.problem import BACK, AttentionProblem, Strides
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
