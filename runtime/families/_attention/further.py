"""The tensors that scores depend on beside q and k: their checks, and how kernels read them.

bias and mask are of every score, [batch, heads, seq_q, seq_k], or broadcast to it; packed, of
[sequences, heads, max_seqlen_q, max_seqlen_k]. Kernels take any strides of 16 bytes, 0 too, but for
columns, which are side by side: others are copied, with rows as long as 16 bytes ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from warploom.errors import ProblemError
from warploom.runtime.counters import counters

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments

Scores = tuple[int, int, int, int]  # batch, heads, rows, columns
Strides = tuple[int, int, int]
BIASES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
OF_SCORES = ("bias", "mask")
_UNIT = 16  # bytes


def check_further(call: Arguments, scores: Scores) -> None:
    """Raise ProblemError for further tensors that are not what a call takes."""
    _check_sinks(call, scores)
    _check_slopes(call, scores)
    bias, mask = call.bias, call.mask
    if bias is not None:
        _check_broadcast("bias", bias, scores)
        if bias.dtype not in BIASES:
            raise ProblemError(
                f"bias of {bias.dtype}",
                rule="must be of torch.float16, torch.bfloat16 or torch.float32",
                fix="pass a mask of truth values as mask=, or convert with .float()",
            )
        if bias.requires_grad and call.softcap is not None:
            raise ProblemError(
                "bias that requires grad with a softcap",
                rule="a bias has a gradient without softcap only",
                fix="leave out softcap, or detach the bias",
            )
    if mask is not None:
        _check_broadcast("mask", mask, scores)
        if mask.dtype != torch.bool:
            raise ProblemError(
                f"mask of {mask.dtype}",
                rule="must be of torch.bool: True where a score counts",
                fix="pass what is added to scores as bias=",
            )


def _check_sinks(call: Arguments, scores: Scores) -> None:
    sinks, heads = call.sinks, scores[1]
    if sinks is None:
        return
    fits = sinks.shape == (heads,) and sinks.is_contiguous()
    if not fits or sinks.dtype not in (torch.float32, call.q.dtype):
        raise ProblemError(
            f"sinks {list(sinks.shape)} {sinks.dtype} with strides {list(sinks.stride())}",
            rule=f"must be [{heads}], a score for each head of q, contiguous, of fp32 or the type "
            "of q",
            fix="convert with .float(), and .contiguous()",
        )


def _check_slopes(call: Arguments, scores: Scores) -> None:
    slopes, (batch, heads, _, _) = call.alibi_slopes, scores
    if slopes is None:
        return
    fits = slopes.shape in ((heads,), (batch, heads)) and slopes.is_contiguous()
    if not fits or slopes.dtype != torch.float32:
        raise ProblemError(
            f"alibi_slopes {list(slopes.shape)} {slopes.dtype} with strides "
            f"{list(slopes.stride())}",
            rule=f"must be [{heads}] or [{batch}, {heads}], contiguous, of torch.float32",
            fix="convert with .float(), and .contiguous()",
        )
    if slopes.requires_grad:
        raise ProblemError(
            "alibi_slopes that require grad",
            rule="slopes have no gradient",
            fix="detach them, or pass what they add to scores as bias=",
        )


def _check_broadcast(name: str, tensor: torch.Tensor, scores: Scores) -> None:
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


def copies_of(call: Arguments) -> tuple[str, ...]:
    """Which of bias and mask kernels cannot read where they lie."""
    given, columns = call.further, columns_of(call)
    return tuple(name for name in OF_SCORES if name in given and not readable(given[name], columns))


def problem_fields(call: Arguments, copies: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a kernel's problem that further tensors decide."""
    given, columns = call.further, columns_of(call)
    found: dict[str, Any] = {
        f"strides_{name}": strides(given[name], columns, copied=name in copies)
        for name in OF_SCORES
        if name in given
    }
    slopes = call.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        found["alibi_batch"] = slopes.shape[1]
    return found


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
