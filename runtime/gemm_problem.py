"""A GEMM call as the generator sees it: checked, its operands placed where TMA can read them.

All but `refuse_grad` and `matrix` is for calls that are planned, and for addresses seen first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, cast, get_args

import torch

from warploom.errors import ProblemError
from warploom.generator.elements import element
from warploom.generator.families.gemm import Accumulation, Batches, GemmOperation, GemmProblem
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import PITCH_BYTES, readable
from warploom.runtime import epilogue, operands
from warploom.runtime.batches import batches, broadcast, stacked
from warploom.runtime.elements import NAMES, name_of
from warploom.runtime.epilogue import BoundEpilogue, Item
from warploom.runtime.operands import (
    Placement,
    extent_bytes,
    overlap,
    padded_copy,
    padded_room,
    place,
)

Placed = tuple[Placement, Batches]


class Options(NamedTuple):
    """What a call asks for beside its tensors."""

    out_dtype: torch.dtype | None = None
    accumulation: Accumulation = "fast"
    spec: KernelSpec | None = None


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
class CheckedCall:
    """A call that kernels can run: what it computes, on which extents and pitches, and how."""

    operation: GemmOperation
    problem: GemmProblem
    epilogue: BoundEpilogue
    store: str  # the only way in which D can be stored where it lies: `tma` or `direct`
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    copy_a: Copy | None  # where TMA cannot read it
    copy_b: Copy | None


def check_call(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    options: Options,
) -> CheckedCall:
    """Check the tensors of a call and place its operands, in the layouts of a spec if given.

    Raises ProblemError naming the tensor, the rule and the fix.
    """
    shape, shared = _extents(a, b, options.spec)
    m, n, k = (shape[-2] if shared is not None else a.shape[:-1].numel(), shape[-1], a.shape[-1])
    device = a.get_device()
    bound = epilogue.bind(listed, m, n, device, shared)
    d_type = result_type(a, out, options.out_dtype, len(listed) > 0)
    pitch_d, batch_pitch_d = _check_out(out, shape, d_type, device, shared)
    allowed_a, allowed_b = _layouts(a, options.spec)
    at_a, batches_a, copy_a = _place(a, allowed_a, shared)
    at_b, batches_b, copy_b = _place(b, allowed_b, shared)
    operation = GemmOperation(
        a=name_of(a.dtype, "a"),  # type: ignore[arg-type]
        b=name_of(b.dtype, "b"),  # type: ignore[arg-type]
        d=NAMES[d_type],  # type: ignore[arg-type]
        layout_a=at_a.layout,  # type: ignore[arg-type]
        layout_b=at_b.layout,  # type: ignore[arg-type]
        accumulation=_accumulation(options),
        batched=shared is not None,
        epilogue=bound.steps,
    )
    problem = GemmProblem(
        *(m, n, k),
        *(at_a.pitch, at_b.pitch, pitch_d),
        pitch_c=bound.pitch_c,
        batches=prod(shared or ()),
        batches_a=batches_a,
        batches_b=batches_b,
        batch_pitch_d=batch_pitch_d,
        batch_pitch_steps=bound.batch_pitches,
    )
    return CheckedCall(
        operation=operation,
        problem=problem,
        epilogue=bound,
        store=_store(out, n, (pitch_d, batch_pitch_d), d_type, bound),
        out_shape=shape,
        out_dtype=d_type,
        copy_a=copy_a,
        copy_b=copy_b,
    )


def _extents(
    a: torch.Tensor, b: torch.Tensor, spec: KernelSpec | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shape of D, and its batches; None where B has none, and A's are rows of one matrix."""
    try:
        if min(a.dim(), b.dim()) < 2 or a.shape[-1] != b.shape[-2]:
            raise RuntimeError
        shared = broadcast(a, b)
    except RuntimeError:
        raise ProblemError(
            f"a {list(a.shape)} by b {list(b.shape)}",
            rule="a is [.., M, K] and b is [.., K, N], with one K, and batches that broadcast",
            fix="a torch weight [N, K] is b after .t()",
        ) from None
    mixed = a.dtype != b.dtype
    if mixed and not all(element(name_of(t.dtype, "an operand")).is_fp8 for t in (a, b)):
        raise ProblemError(
            f"a {a.dtype} by b {b.dtype}",
            rule="have one type, or are both fp8",
            fix="convert one",
        )
    if a.device != b.device:
        raise ProblemError(
            f"a on {a.device}, b on {b.device}", rule="are on one device", fix="move one"
        )
    asked = spec is not None and cast("GemmOperation", spec.operation).batched
    batched = b.dim() > 2 or (asked and a.dim() == 2)
    return (*shared, a.shape[-2], b.shape[-1]), shared if batched else None


def _place(
    operand: torch.Tensor, allowed: tuple[str, ...], shared: tuple[int, ...] | None
) -> tuple[Placement, Batches, Copy | None]:
    """Where TMA reads A or B: in place if it can, else in a copy in the first allowed layout."""
    if found := _in_place(operand, allowed, shared):
        return *found, None
    copy = Copy(allowed[0], shared)
    return *cast("Placed", _in_place(copy.room(operand), allowed[:1], shared)), copy


def _in_place(
    operand: torch.Tensor, allowed: tuple[str, ...], shared: tuple[int, ...] | None
) -> Placed | None:
    first = operand
    if operand.dim() > 2 and shared is None:
        first = matrix(operand)  # a copy where the rows are not one pitch apart
        if first.data_ptr() != operand.data_ptr():
            return None
    elif operand.dim() > 2 and operand.numel():
        first = operand[(0,) * (operand.dim() - 2)]
    at = place(first, allowed) if first.dim() == 2 else Placement(allowed[0], operand.shape[-1])
    lie = Batches() if shared is None else batches(operand, shared)
    if at is None or lie is None or lie.pitch * operand.element_size() % PITCH_BYTES:
        return None
    return at, lie


def _accumulation(options: Options) -> Accumulation:
    if options.accumulation not in get_args(Accumulation):
        raise ProblemError(
            f"accumulation {options.accumulation!r}",
            rule=f"is one of {', '.join(get_args(Accumulation))}",
            fix="leave it out for the fast one",
        )
    if options.spec is not None and options.accumulation == "fast":
        return cast("GemmOperation", options.spec.operation).accumulation
    return options.accumulation


def result_type(
    a: torch.Tensor, out: torch.Tensor | None, asked: torch.dtype | None, has_epilogue: bool
) -> torch.dtype:
    """The type of D: as asked, else out's, else the default for the operands."""
    if asked is not None:
        return asked
    if out is not None:
        return out.dtype
    if name_of(a.dtype, "a") == "int8" and not has_epilogue:
        return torch.int32
    return a.dtype if element(name_of(a.dtype, "a")).bits == 16 else torch.bfloat16


def _check_out(
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    shared: tuple[int, ...] | None,
) -> tuple[int, int]:
    """Check D, and return the elements between its rows and between its batches."""
    name_of(dtype, "out")
    m, n = shape[-2:]
    if out is None:
        return n, m * n
    if tuple(out.shape) != shape or out.dtype != dtype or out.get_device() != device:
        raise ProblemError(
            f"out {list(out.shape)} {out.dtype} on {out.device}",
            rule=f"is {list(shape)} of {dtype} on the device of a",
            fix="leave out=None to have it made",
        )
    if out.numel() == 0:
        return n, m * n
    pitch, apart = (out.stride(-2) if m > 1 else -(-n // 16) * 16), 0  # of one row: any
    lie: Batches | None = Batches()
    if shared is not None:
        lie = batches(out, shared)
        apart = lie.pitch if lie else 0
    elif out.dim() > 2:
        lie = Batches() if out.is_contiguous() else None
        pitch = n
    if lie is None or (n > 1 and out.stride(-1) != 1):
        raise ProblemError(
            f"out with strides {list(out.stride())}",
            rule="has a contiguous last dimension, one pitch between rows and one between batches",
            fix="use a row-major out",
        )
    dimensions = [(n, 1)] * (n > 1) + [(m, pitch)] * (m > 1) + [(lie.count, apart)] * (apart > 0)
    if lie.count != prod(shared or ()) or not _apart(dimensions):
        raise ProblemError(
            f"out with strides {list(out.stride())}",
            rule="has no two elements in one place",
            fix="do not pass an expanded tensor as out",
        )
    return pitch, apart


def _apart(dimensions: list[tuple[int, int]]) -> bool:
    """True when no two elements share a place: each stride steps over all of the smaller ones."""
    reached = 0
    for extent, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
        if stride <= reached:
            return False
        reached += (extent - 1) * stride
    return True


def _layouts(a: torch.Tensor, spec: KernelSpec | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layouts in which A and B may be read in place, the one that a copy takes first."""
    if spec is not None:
        operation = cast("GemmOperation", spec.operation)
        return (operation.layout_a,), (operation.layout_b,)
    if element(name_of(a.dtype, "a")).bits == 16:
        return ("row", "col"), ("col", "row")
    return ("row",), ("col",)


def _store(
    out: torch.Tensor | None,
    n: int,
    pitches: tuple[int, int],
    d_type: torch.dtype,
    bound: BoundEpilogue,
) -> str:
    """TMA stores 16 bytes at a time: rows must end, as well as begin, at a multiple of them."""
    size = element(NAMES[d_type]).bytes
    base = 0 if out is None else out.data_ptr()
    whole = n * size % PITCH_BYTES == 0 and readable(base, *(pitch * size for pitch in pitches))
    return "tma" if whole and bound.paired else "direct"


def refuse_grad(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> None:
    """Raise ProblemError when autograd expects a graph that these kernels do not build."""
    values = (value for item in listed for value in item[1:2])
    operands.refuse_grad("warploom.gemm", a, b, out, *values)


def refuse_overlap(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item]
) -> None:
    """Raise ProblemError when `out` shares memory with an operand, unless it is the residual."""
    operands = [("a", a), ("b", b)]
    operands += [(item[0], item[1]) for item in listed if isinstance(item[1], torch.Tensor)]
    for name, operand in operands:
        same = (
            name == "residual"
            and operand.data_ptr() == out.data_ptr()
            and operand.dtype == out.dtype
            and operand.numel() == out.numel()
            and (
                (operand.shape, operand.stride()) == (out.shape, out.stride())
                or (operand.is_contiguous() and out.is_contiguous())
            )
        )
        if overlap(out, operand) and not same:
            raise ProblemError(
                "out at {:#x}..{:#x}".format(*extent_bytes(out))
                + " and {} at {:#x}..{:#x}".format(name, *extent_bytes(operand)),
                rule="do not overlap; out may be exactly the residual",
                fix="use another out",
            )


def matrix(a: torch.Tensor) -> torch.Tensor:
    """Return A [.., M, K] as one matrix; a copy where its strides do not allow a view."""
    return a if a.dim() == 2 else a.flatten(0, -2)
