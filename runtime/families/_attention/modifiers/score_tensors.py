"""Tensors of every score, as a bias and a mask are: how kernels read them.

They are [batch, heads, seq_q, seq_k], or broadcast to it; of varying lengths, [sequences, heads,
max_seqlen_q, max_seqlen_k]. Kernels take any strides of 16 bytes, 0 too, but for columns, which are
contiguous: others are copied, with rows as long as 16 bytes ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.errors import ProblemError
from warploom.runtime.counters import counters
from warploom.runtime.families._attention.modifiers.modifier import Rows, Scores, grouped

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments

Strides = tuple[int, int, int]
_UNIT = 16  # bytes


def check_broadcast(name: str, tensor: torch.Tensor, scores: Scores) -> None:
    shape = tuple(tensor.shape)
    aligned = zip(shape[::-1], scores[::-1], strict=False)
    if len(shape) > len(scores) or any(one not in (1, extent) for one, extent in aligned):
        raise ProblemError(
            f"{name} {list(shape)}",
            rule=f"must be {list(scores)}, or broadcast to it: [batch, heads, rows, columns] of "
            "scores (packed: of the longest)",
            fix="unsqueeze the dimensions that it lacks",
        )


def four(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with all four dimensions of scores; what is broadcast is 1."""
    return tensor[(None,) * (4 - tensor.dim())]


def readable(tensor: torch.Tensor, columns: int) -> bool:
    """Whether kernels read a bias or mask where it lies."""
    whole = four(tensor)
    steps = zip(whole.shape[:3], whole.stride()[:3], strict=True)
    pitches = [step * tensor.element_size() for extent, step in steps if extent > 1]
    dense = whole.shape[3] == columns and (columns == 1 or whole.stride(3) == 1)
    return dense and not any(pitch % _UNIT for pitch in (tensor.data_ptr(), *pitches))


def columns_of(call: Arguments) -> int:
    """The columns that a bias or mask has, or is broadcast to."""
    return call.k.shape[2] if call.max_seqlen_k is None else call.max_seqlen_k


def row_pitch(tensor: torch.Tensor, columns: int) -> int:
    """Elements of a row of a copy, whose rows begin at multiples of 16 bytes."""
    unit = _UNIT // tensor.element_size()
    return -(-columns // unit) * unit


def copy(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """A copy that kernels can read: of what is broadcast only columns are repeated. Counted."""
    counters.add("copies")
    whole = four(tensor)
    room = whole.new_empty((*whole.shape[:3], row_pitch(tensor, columns)))[..., :columns]
    return room.copy_(whole)


def strides(tensor: torch.Tensor, columns: int, *, copied: bool) -> Strides:
    """The strides of batch, head and row where a kernel reads; 0 where one serves all."""
    whole = four(tensor)
    batch, heads, rows = whole.shape[:3]
    steps: tuple[int, ...] = whole.stride()[:3]
    if copied:
        pitch = row_pitch(tensor, columns)
        steps = (heads * rows * pitch, rows * pitch, pitch)
    b, h, r = (s if n > 1 else 0 for n, s in zip((batch, heads, rows), steps, strict=True))
    return b, h, r


def room_for(columns: int, tensor: torch.Tensor) -> torch.Tensor:
    """The same, in rows that begin at multiples of 16 bytes."""
    room = tensor.new_empty((*tensor.shape[:3], row_pitch(tensor, columns)))[..., :columns]
    return room.copy_(tensor)


def batch_of(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """What one of several sequences has of a tensor, whose batch may be 1 for all of them."""
    whole = four(tensor)
    return whole if whole.shape[0] == 1 else whole[index : index + 1]


def of_chunk(tensor: torch.Tensor, q: torch.Tensor, k: torch.Tensor, chunk: Rows) -> torch.Tensor:
    """What a chunk of scores has of a tensor."""
    whole = four(tensor).expand(*q.shape[:3], k.shape[2])
    return grouped(whole[chunk.batch, :, chunk.rows], k)
