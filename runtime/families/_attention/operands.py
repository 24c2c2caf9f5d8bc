"""How q, k, v and out lie in memory, and whether TMA can address them there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch

from warploom.errors import ProblemError
from warploom.generator.tensor_maps import readable
from warploom.runtime.counters import counters
from warploom.runtime.families._attention.modifiers import score_tensors
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.operands import dense_copy, refuse_overlap, refuse_repeated

Strides = tuple[int, int, int]
ArgumentsT = TypeVar("ArgumentsT", bound=Arguments)


def in_place(tensor: torch.Tensor) -> bool:
    """True when TMA can address the tensor where it is. Broadcast views (stride 0) are copied."""
    steps = [s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
    pitches = [step * tensor.element_size() for step in steps]
    return tensor.stride(-1) == 1 and 0 not in steps and readable(tensor.data_ptr(), *pitches)


def strides(tensor: torch.Tensor, *, packed: bool) -> Strides:
    """Return the strides of batch, head and seq in elements; where an extent is 1, a legal one."""
    dim = tensor.shape[-1]
    steps = [
        s if n > 1 else dim for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    return (0, steps[1], steps[0]) if packed else (steps[0], steps[1], steps[2])


def placed(name: str, tensor: torch.Tensor, copies: tuple[str, ...], *, packed: bool) -> Strides:
    """The strides of an operand where a kernel reads it: its own, or those of its copy."""
    at = torch.empty(tensor.shape, device="meta") if name in copies else tensor
    return strides(at, packed=packed)


def ordered_strides(q: torch.Tensor, dim: int | None = None) -> tuple[int, ...]:
    """Return the strides of a dense tensor with the shape of q and its order of dimensions.

    The last dimension, which is `dim` long or as that of q, is contiguous; so what is projected
    next lies as the model's tensors do.
    """
    steps, step = [1] * q.dim(), q.shape[-1] if dim is None else dim
    for index in sorted(range(q.dim() - 1), key=q.stride, reverse=True)[::-1]:
        steps[index] = step
        step *= max(1, q.shape[index])
    return tuple(steps)


def empty_like(tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """A dense tensor like this one, with its order of dimensions, the last `dim` long if given."""
    dim = tensor.shape[-1] if dim is None else dim
    return tensor.new_empty_strided((*tensor.shape[:-1], dim), ordered_strides(tensor, dim))


def check_out(call: Arguments) -> None:
    """Raise ProblemError for an `out` that the result cannot be stored in."""
    out, q = call.out, call.q
    if out is None:
        return
    shape = (*q.shape[:-1], call.values_shape[-1])
    if out.shape != shape or out.dtype != call.result_dtype or out.device != q.device:
        raise ProblemError(
            f"out {list(out.shape)} {out.dtype} on {out.device}",
            rule=f"must be {list(shape)} of {call.result_dtype} on the device of q",
            fix="leave out=None to have it made",
        )
    if out.numel() and not in_place(out):
        raise ProblemError(
            f"out at {out.data_ptr():#x} with strides {list(out.stride())}",
            rule="its last dimension is contiguous, its address and other strides are multiples "
            "of 16 bytes",
            fix="leave out=None to have it made",
        )
    refuse_repeated("out", out)


def check_apart(call: Arguments, out: torch.Tensor) -> None:
    """Raise ProblemError when `out` shares memory with q, k or v."""
    read = (("q", call.q), ("k", call.k), ("v", call.v))
    refuse_overlap(out, read, "out does not overlap q, k or v")


def copied(call: ArgumentsT, copies: tuple[str, ...]) -> ArgumentsT:
    """The same call, of copies of those of q, k, v, bias and mask that are named."""
    q, k, v = (
        contiguous_copy(tensor) if name in copies else tensor
        for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v))
    )
    columns = score_tensors.columns_of(call)
    others: dict[str, Any] = {
        name: score_tensors.copy(tensor, columns)
        for name, tensor in call.further.items()
        if name in copies
    }
    return replace(call, q=q, k=k, v=v, **others)


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to contiguous memory, whatever it is that TMA cannot read in place. Counted."""
    counters.add("copies")
    return dense_copy(tensor)
