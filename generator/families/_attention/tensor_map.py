"""The tensor maps of both passes: of a tensor by head, in boxes of rows."""

from __future__ import annotations

from warploom.generator.elements import Element
from warploom.generator.families._attention.problem import BACK, AttentionProblem, Strides
from warploom.generator.tensor_maps import TensorMap

_KEYS = ("k", "v", "dk", "dv")  # laid out by kv heads, and columns


def tensor_map(
    tensor: str,
    element: Element,
    problem: AttentionProblem,
    strides: Strides,
    box: tuple[int, int],
    span: int,
    *,
    packed: bool,
) -> TensorMap:
    """The map of one of q, k, v, do, dk and dv, with `strides`, in boxes of (elements, rows).

    Packed, it is read from a row of any sequence on: templates/_attention/lengths_packed.cuh says
    how.
    """
    of_keys = tensor in _KEYS
    seq = problem.total_k if of_keys else problem.total_q
    heads = problem.kv_heads if of_keys else problem.heads
    columns, rows = box
    batch_stride, head_stride, seq_stride = (stride * element.bytes for stride in strides)
    extents: tuple[int, ...] = (problem.dim, seq, heads, problem.batch)
    pitches: tuple[int, ...] = (seq_stride, head_stride, batch_stride)
    if packed:
        extents = (problem.dim, rows, heads, BACK - rows + seq + 1, BACK + 1)
        pitches = (seq_stride, head_stride, seq_stride, 2**34 - seq_stride)
    return TensorMap(
        tensor=tensor,
        element=element,
        extents=extents,
        pitches=pitches,
        box=(columns, rows, *(1 for _ in extents[2:])),
        span=span,
    )
