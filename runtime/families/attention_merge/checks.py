"""What the tensors of a call must be, whatever their contents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.errors import ProblemError
from warploom.runtime.operands import LOAD, loadable, refuse_repeated
from warploom.runtime.tensors import shown

if TYPE_CHECKING:
    from warploom.runtime.families.attention_merge.call import AttentionMergeCall

AXES = 3  # that rows have at most
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_EIGHTS = 8  # elements that a thread moves at once
_LONGEST = 512  # elements of a row


def check_shapes(call: AttentionMergeCall) -> None:
    """Raise ProblemError for tensors that do not fit each other."""
    out_a, lse_a = call.out_a, call.lse_a
    if not 1 <= out_a.dim() <= AXES + 1:
        raise ProblemError(
            f"out_a {list(out_a.shape)}",
            rule=f"must be [.., dim] with at most {AXES} dimensions before the last",
            fix="flatten some of them",
        )
    dim = out_a.shape[-1]
    if dim % _EIGHTS or not dim or dim > _LONGEST:
        raise ProblemError(
            f"out_a {list(out_a.shape)}",
            rule=f"must have rows of a multiple of {_EIGHTS} elements, at most {_LONGEST}",
            fix="split or pad the last dimension",
        )
    rows = out_a.shape[:-1]
    for name, one in call.named():
        wanted = rows if name.startswith("lse") else out_a.shape
        if one is not None and one.shape != wanted:
            raise ProblemError(
                f"{name} {list(one.shape)}, out_a {list(out_a.shape)}",
                rule=f"{name} must be {list(wanted)}: nothing is broadcast",
                fix=f"expand or transpose {name}",
            )
    for name, one in (("lse_a", lse_a), ("lse_b", call.lse_b), ("lse", call.lse)):
        if one is not None and one.dtype != torch.float32:
            raise ProblemError(
                f"{name} {one.dtype}", rule="must be float32", fix=f"use {name}.float()"
            )


def result_type(call: AttentionMergeCall) -> torch.dtype:
    """The type of out, once those of all are known to be right."""
    out = call.out
    dtype = call.out_dtype or (call.out_a.dtype if out is None else out.dtype)
    for name, one in (
        ("out_a", call.out_a.dtype),
        ("out_b", call.out_b.dtype),
        ("out", dtype if out is None else out.dtype),
        ("out_dtype", dtype),
    ):
        if one not in FLOATS:
            raise ProblemError(
                f"{name} {shown(one)}",
                rule="must be float16, bfloat16 or float32",
                fix="convert it",
            )
    return dtype


def check_results(call: AttentionMergeCall, dtype: torch.dtype) -> None:
    """What was given for results can be written."""
    for name, one in (("out", call.out), ("lse", call.lse)):
        if one is not None:
            refuse_repeated(name, one)
    if call.out is not None and (call.out.dtype != dtype or not loadable(call.out)):
        raise ProblemError(
            f"out {call.out.dtype} with strides {list(call.out.stride())}",
            rule=f"must be {dtype}, with a contiguous last dimension, at an address and with "
            f"other strides that are multiples of {LOAD} bytes",
            fix="leave it out to have it made",
        )
