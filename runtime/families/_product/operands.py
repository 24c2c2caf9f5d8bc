"""A, B and D of a GEMM in memory: read and stored in place, copied, or refused.

The batches of D are counted in one row, the last dimension the fastest. A tensor is read in place
where one stride leads from each of its own batches to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from warploom.arguments import require_dtype
from warploom.errors import ProblemError
from warploom.generator.elements import ELEMENTS, Element
from warploom.generator.families._product import Batches, Store
from warploom.generator.tensor_maps import PITCH_BYTES, readable
from warploom.runtime.counters import counters
from warploom.runtime.elements import BY_DTYPE, NAMES, name_of
from warploom.runtime.operands import refuse_repeated

Dimension = tuple[int, int, int]  # extent in D, own extent, stride


def broadcast(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Return the batches of a b; RuntimeError where those of the two do not broadcast."""
    if a.dim() == b.dim() == 2:  # torch's function takes as long as a launch
        return ()
    return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))  # type: ignore[no-untyped-call]


def batches(tensor: torch.Tensor, shape: Sequence[int], trailing: int = 2) -> Batches | None:
    """Return how the batches of `tensor` lie in those of D, which have `shape`; None for anyhow.

    The tensor's last `trailing` dimensions are a matrix or a vector; those before broadcast. A
    dimension of stride 0 counts as broadcast too, so that an expanded view is read once.
    """
    if tensor.numel() == 0:  # nothing is read, and its strides mean nothing
        return Batches()
    own = _dimensions(tensor, shape, trailing)
    repeat = 1
    while own and own[-1][1] == 1:  # broadcast on the fast side: repeated in a row
        repeat *= own.pop()[0]
    while own and own[0][1] == 1:  # on the slow side: all repeated
        own.pop(0)
    if not own:
        return Batches()
    pitch = own[-1][2]
    expected = pitch
    for extent, count, stride in reversed(own):
        if count != extent or stride != expected:
            return None
        expected = stride * extent
    return Batches(prod(extent for extent, _, _ in own), pitch, repeat)


def _dimensions(tensor: torch.Tensor, shape: Sequence[int], trailing: int) -> list[Dimension]:
    leading = tensor.dim() - trailing
    missing = len(shape) - leading
    own = zip(tensor.shape[:leading], tensor.stride()[:leading], strict=True)
    return [
        (extent, 1 if stride == 0 else count, stride)
        for extent, (count, stride) in zip(shape, [(1, 0)] * missing + list(own), strict=True)
        if extent != 1
    ]


def stacked(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a view of `tensor` whose batches, copied as they come, lie one pitch apart."""
    leading = tensor.dim() - 2
    once = tensor[
        tuple(slice(0, 1) if tensor.stride(i) == 0 else slice(None) for i in range(leading))
    ]
    fits = batches(once.new_empty(once.shape, device="meta"), shape) is not None
    return once if fits else tensor.expand(*shape, *tensor.shape[-2:])


def step_pitch(tensor: torch.Tensor, shape: Sequence[int], trailing: int) -> int | None:
    """Return the elements between the batches of what a step of the epilogue reads, or None.

    It has every batch of D or none of its own (0).
    """
    found = batches(tensor, shape, trailing)
    if found is None or (found.count > 1 and found.count != prod(shape)):
        return None
    return found.pitch if found.count > 1 else 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A matrix that TMA can read: `row` or `col` major, elements between its rows (columns)."""

    layout: str
    pitch: int


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
        pitch = outer
        if count == 1:  # a single row may claim any
            pitch = -(-extent * size // PITCH_BYTES) * PITCH_BYTES // size
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


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of an operand that TMA can read: to a layout, of all its batches where D has some."""

    layout: str
    batches: tuple[int, ...] | None

    def __call__(self, operand: torch.Tensor) -> torch.Tensor:
        """Return the copy; it is counted."""
        return padded_copy(self._source(operand), self.layout)

    def room(self, operand: torch.Tensor) -> torch.Tensor:
        """Return a tensor without memory that lies as the copy will."""
        return padded_room(self._source(operand), self.layout, "meta")

    def _source(self, operand: torch.Tensor) -> torch.Tensor:
        return matrix(operand) if self.batches is None else stacked(operand, self.batches)


@dataclass(frozen=True, slots=True)
class Operand:
    """A or B as kernels read it: what is read of its tensor once, where a call is planned.

    element   of the table of element types
    matrix    where TMA reads its matrix, or the first of its batches
    batches   how its batches lie beside those of D
    copy      how it is copied first, where TMA cannot read it in place
    """

    element: Element
    matrix: Placement
    batches: Batches
    copy: Copy | None = None

    @classmethod
    def of(
        cls, tensor: torch.Tensor, allowed: tuple[str, ...], shared: tuple[int, ...] | None
    ) -> Operand:
        """Return the operand in place if TMA can read it, else copied to the first allowed layout.

        Args:
            tensor: Of a type that is in the table.
            allowed: Its layouts, row or col or both, that kernels may read.
            shared: The batches of D; None where it has none.
        """
        in_place = _in_place(tensor, allowed, shared)
        if in_place is not None:
            return cls(BY_DTYPE[tensor.dtype], *in_place)
        copy = Copy(allowed[0], shared)
        copied = _in_place(copy.room(tensor), allowed[:1], shared)
        if copied is None:
            raise AssertionError("TMA reads what was laid out for it")
        return cls(BY_DTYPE[tensor.dtype], *copied, copy)


def _in_place(
    operand: torch.Tensor, allowed: tuple[str, ...], shared: tuple[int, ...] | None
) -> tuple[Placement, Batches] | None:
    first = operand
    if operand.dim() > 2 and shared is None:
        try:
            first = operand.view(operand.shape[:-1].numel(), operand.shape[-1])
        except RuntimeError:  # its rows are not one pitch apart
            return None
    elif operand.dim() > 2 and operand.numel():
        first = operand[(0,) * (operand.dim() - 2)]
    at = place(first, allowed) if first.dim() == 2 else Placement(allowed[0], operand.shape[-1])
    lie = Batches() if shared is None else batches(operand, shared)
    if at is None or lie is None or lie.pitch * operand.element_size() % PITCH_BYTES:
        return None
    return at, lie


def matrix(a: torch.Tensor) -> torch.Tensor:
    """Return A [.., M, K] as one matrix; a copy where its strides do not allow a view."""
    return a if a.dim() == 2 else a.flatten(0, -2)


def result_type(
    a: torch.Tensor, out: torch.Tensor | None, asked: torch.dtype | None, has_epilogue: bool
) -> torch.dtype:
    """The type of D: as asked, else out's, else the default for the operands."""
    if asked is not None:
        require_dtype("out_dtype", asked, NAMES)
        return asked
    if out is not None:
        return out.dtype
    name = NAMES.get(a.dtype) or name_of(a.dtype, "a")  # which raises
    if name == "int8" and not has_epilogue:
        return torch.int32
    return a.dtype if ELEMENTS[name].bits == 16 else torch.bfloat16


def check_out(
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    shared: tuple[int, ...] | None,
) -> tuple[int, int]:
    """Check D [*shape], and return the elements between its rows and between its batches.

    `shared` are its batches; None where it has none. Raises ProblemError for an `out` of another
    shape, type or device, or that no pitch leads through.
    """
    if dtype not in BY_DTYPE:
        name_of(dtype, "out")  # raises
    m, n = shape[-2:]
    if out is None:
        return n, m * n
    if tuple(out.shape) != shape or out.dtype != dtype or out.get_device() != device:
        raise ProblemError(
            f"out {list(out.shape)} {out.dtype} on {out.device}",
            rule=f"must be {list(shape)} of {dtype} on the device of a",
            fix="leave out=None to have it made",
        )
    if out.numel() == 0:
        return n, m * n
    refuse_repeated("out", out)
    pitch: int | None
    apart: int | None = 0
    if shared is None:
        pitch = step_pitch(out, shape[:-1], trailing=1)
    else:
        pitch, lie = out.stride(-2), batches(out, shared)
        apart = lie.pitch if lie else None
    if pitch is None or apart is None or (n > 1 and out.stride(-1) != 1):
        through = "through all rows" if shared is None else "between rows and one between batches"
        raise ProblemError(
            f"out {list(out.shape)} with strides {list(out.stride())}",
            rule=f"must have a contiguous last dimension, and one stride {through}",
            fix="use a row-major out",
        )
    one_row = prod(shape[:-1] if shared is None else (m,)) == 1
    return -(-n // 16) * 16 if one_row else pitch, apart  # of one row: any


def storing(
    out: torch.Tensor | None,
    n: int,
    pitches: tuple[int, int],
    d_type: torch.dtype,
    *,
    paired: bool,
) -> Store:
    """How D can be stored where it lies: also by TMA, or directly only.

    TMA stores 16 bytes at a time: rows must end, as well as begin, at a multiple of them. And its
    kernels read the epilogue's operands in pairs, which must be possible (`paired`).
    """
    size = d_type.itemsize
    base = 0 if out is None else out.data_ptr()
    whole = readable(base, n * size, pitches[0] * size, pitches[1] * size)
    return "tma" if whole and paired else "direct"
