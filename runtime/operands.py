"""How a matrix of a call lies in memory, and whether TMA can read it there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from warploom.errors import ProblemError
from warploom.generator.tensor_maps import PITCH_BYTES, readable
from warploom.runtime.counters import counters
from warploom.runtime.families.gemm.batches import step_pitch


@dataclass(frozen=True, slots=True)
class Placement:
    """A matrix that TMA can read: `row` or `col` major, elements between its rows (columns)."""

    layout: str
    pitch: int


def _pitch(extent: int, count: int, stride: int, size: int) -> int:
    """The stride between `count` rows of `extent` elements; a single row may claim any."""
    return stride if count > 1 else -(-extent * size // PITCH_BYTES) * PITCH_BYTES // size


def place(matrix: torch.Tensor, allowed: tuple[str, ...]) -> Placement | None:
    """Return how TMA reads `matrix` in place, in one of the `allowed` layouts, or None.

    Rows must not overlap: a broadcast view (stride 0) is never read in place.
    """
    rows, columns = matrix.shape
    row_stride, column_stride = matrix.stride()
    size = matrix.element_size()
    if rows == 0 or columns == 0:
        return Placement(allowed[0], max(rows, columns))
    for layout in allowed:
        extent, count, inner, outer = (
            (columns, rows, column_stride, row_stride)
            if layout == "row"
            else (rows, columns, row_stride, column_stride)
        )
        pitch = _pitch(extent, count, outer, size)
        contiguous = inner == 1 or extent == 1
        if contiguous and pitch >= extent and readable(matrix.data_ptr(), pitch * size):
            return Placement(layout, pitch)
    return None


def padded_room(like: torch.Tensor, layout: str, device: torch.device | str) -> torch.Tensor:
    """Return memory for a copy of `like` [.., rows, columns] that TMA can read in `layout`.

    Its rows (or columns) start at multiples of 16 bytes.
    """
    *batches, rows, columns = (like if layout == "row" else like.mT).shape
    size = like.element_size()
    pitch = -(-columns * size // PITCH_BYTES) * PITCH_BYTES // size
    room = torch.empty((*batches, rows, pitch), dtype=like.dtype, device=device)[..., :columns]
    return room if layout == "row" else room.mT


def padded_copy(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy `matrix` (or a stack of them) to where TMA can read it. Counted."""
    counters.add("copies")
    return padded_room(matrix, layout, matrix.device).copy_(matrix)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True when two tensors may share memory; column ranges of rows of one pitch are told apart."""
    (first, last), (begin, end) = extent_bytes(one), extent_bytes(other)
    if begin >= last or first >= end:
        return False
    pitches = {(_rows_apart(t) or 0) * t.element_size() for t in (one, other)}
    if len(pitches) != 1 or min(pitches) == 0:
        return True
    (pitch,) = pitches
    widths = [t.shape[-1] * t.element_size() for t in (one, other) if t.stride(-1) == 1]
    if len(widths) != 2 or max(widths) > pitch:
        return True
    shift = (begin - first) % pitch  # where other's columns begin, counted from one's
    return shift < widths[0] or shift + widths[1] > pitch


def _rows_apart(tensor: torch.Tensor) -> int | None:
    """Elements from row to row through all leading dimensions, or None."""
    if tensor.dim() == 2:
        return tensor.stride(0)
    return step_pitch(tensor, tensor.shape[:-1], trailing=1) if tensor.dim() > 2 else None


def refuse_repeated(name: str, out: torch.Tensor) -> None:
    """Raise ProblemError when two elements of a result may share a place.

    None do where each stride steps over all of the smaller ones; of an extent of 1 it may be any.
    """
    reached = 0
    steps = zip(out.stride(), out.shape, strict=True) if out.numel() else ()
    for stride, extent in sorted(step for step in steps if step[1] > 1):
        if stride <= reached:
            raise ProblemError(
                f"{name} {list(out.shape)} with strides {list(out.stride())}",
                rule="must have no two elements in one place",
                fix=f"do not pass an expanded or overlapping view as {name}",
            )
        reached += (extent - 1) * stride


def extent_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements and the one past the last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def refuse_overlap(out: torch.Tensor, read: Iterable[tuple[str, torch.Tensor]], rule: str) -> None:
    """Raise ProblemError, with this `rule`, when `out` shares memory with what is read."""
    for name, operand in read:
        if overlap(out, operand):
            raise ProblemError(
                "out at {:#x}..{:#x}".format(*extent_bytes(out))
                + " and {} at {:#x}..{:#x}".format(name, *extent_bytes(operand)),
                rule=rule,
                fix="use another out",
            )
