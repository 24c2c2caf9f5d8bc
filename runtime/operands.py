"""Where the tensors of a call lie in memory: whether they overlap, each other or themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from warploom.errors import ProblemError

LOAD = 16  # bytes that a thread loads or stores at once: rows begin at a multiple


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
    """Elements from row to row through all leading dimensions, or None where that varies."""
    if tensor.dim() <= 2:
        return tensor.stride(0) if tensor.dim() == 2 else None
    steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    varying = [(extent, stride) for extent, stride in steps if extent != 1]
    pitch = expected = varying[-1][1] if varying else 0
    for extent, stride in reversed(varying):
        if stride != expected:
            return None
        expected = stride * extent
    return pitch


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
                rule="must have no two elements at one address",
                fix=f"do not pass an expanded or overlapping view as {name}",
            )
        reached += (extent - 1) * stride


def extent_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements and the one past the last."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():  # as most are, and those without elements
        return first, first + tensor.nbytes
    reached = 1
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        reached += (extent - 1) * stride
    return first, first + reached * tensor.element_size()


def refuse_overlap(
    out: torch.Tensor, read: Iterable[tuple[str, torch.Tensor]], rule: str, name: str = "out"
) -> None:
    """Raise ProblemError, with this `rule`, when `out` shares memory with what is read."""
    first, last = extent_bytes(out)
    for other, operand in read:
        begin, end = extent_bytes(operand)
        if begin < last and first < end and overlap(out, operand):
            raise ProblemError(
                "{} at {:#x}..{:#x}".format(name, *extent_bytes(out))
                + " and {} at {:#x}..{:#x}".format(other, *extent_bytes(operand)),
                rule=rule,
                fix=f"use another {name}",
            )


def loadable(one: torch.Tensor) -> bool:
    """Whether kernels can move LOAD bytes of its rows at once."""
    size = one.element_size()
    steps = zip(one.shape[:-1], one.stride()[:-1], strict=True)
    return (
        one.stride(-1) == 1
        and (one.is_meta or one.data_ptr() % LOAD == 0)
        and all(step * size % LOAD == 0 for extent, step in steps if extent > 1)
    )


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A row-major copy, with the strides that its shape has.

    `.contiguous()` returns a tensor itself that has others in dimensions of size 1, which torch
    deems contiguous: for what looks at strides, nothing is changed then.
    """
    return tensor.clone(memory_format=torch.contiguous_format)


def without_memory(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor for empty_like, which is the quickest way to make one, and asks for no contents.

    Kept memory would be a leak to what pools the memory of a graph.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def maker(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes tensors of this one's shape, strides, type and device, without contents.

    It holds no memory, nor takes any at first. To make one like a tensor on `meta` runs Python in
    torch, which takes 24 us; torch.empty_strided takes one, and what compiled code of torch calls
    in its place, past the dispatcher, a half. The latter is not public, and makes tensors on the
    current GPU: it is left where the process sees several.
    """
    shape, strides, device = tuple(tensor.shape), tensor.stride(), tensor.device
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.device_count() == 1):
        guards: Any = torch._C._dynamo.guards
        quick = getattr(guards, f"_empty_strided_{device.type}", None)
        if quick is not None:
            return partial(quick, shape, strides, tensor.dtype)
    return partial(torch.empty_strided, shape, strides, dtype=tensor.dtype, device=device)
