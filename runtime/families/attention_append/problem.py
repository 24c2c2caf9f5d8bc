"""What a kernel is told of a call: what it computes, and where the rows of its tensors lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from warploom.generator.families.attention_append import (
    AttentionAppendOperation,
    AttentionAppendProblem,
)
from warploom.generator.families.attention_append.schedule import Steps
from warploom.runtime.elements import NAMES
from warploom.runtime.families.attention_append import checks
from warploom.runtime.operands import loadable

if TYPE_CHECKING:
    from warploom.runtime.families.attention_append.call import AttentionAppendCall

_VECTORS = ("lengths", "cu_seqlens", "scale_k", "scale_v")  # contiguous where they are vectors
_ROWS = ("k", "v", "q", "cos", "sin")  # of which 16 bytes are read at once


def operation_of(call: AttentionAppendCall) -> AttentionAppendOperation:
    """What the kernel of a call computes."""
    rotary, scale = call.cos is not None, call.scale_k
    given: dict[str, Any] = {
        "cache": checks.CACHES.get(call.k_cache.dtype, "same"),
        "scales": "none" if scale is None else "token" if scale.dim() == 3 else "head",
        "rotary": "interleaved" if call.interleaved else "halves" if rotary else "none",
        "table": "same" if call.cos is not None and call.cos.dtype == call.k.dtype else "fp32",
    }
    return AttentionAppendOperation(
        NAMES[call.k.dtype],  # type: ignore[arg-type]
        call.k.shape[-1],
        **given,
        queries=call.q is not None,
        packed=call.cu_seqlens is not None,
        paged=call.page_table is not None,
    )


def copies_of(call: AttentionAppendCall) -> tuple[str, ...]:
    """What cannot be read where it lies."""
    read = ((name, getattr(call, name)) for name in _ROWS)
    rows = [name for name, one in read if one is not None and not loadable(one)]
    given = [(name, getattr(call, name)) for name in _VECTORS]
    vectors = [
        name for name, one in given if one is not None and one.dim() < 3 and not one.is_contiguous()
    ]
    table = call.page_table
    entries = table is not None and table.shape[1] > 1 and table.stride(1) != 1
    return (*rows, *vectors, *(("page_table",) if entries else ()))


def problem_of(call: AttentionAppendCall) -> AttentionAppendProblem:
    """Where rows lie: of what is copied or made, as they will."""
    nowhere, copies = torch.device("meta"), copies_of(call)
    lying = {
        name: one if name not in copies else one.new_empty(one.shape, device=nowhere)
        for name, one in call.named()
        if isinstance(one, torch.Tensor)
    }
    k, cache, q, cos = lying["k"], call.k_cache, lying.get("q"), lying.get("cos")
    packed, table, scale = call.cu_seqlens is not None, lying.get("page_table"), call.scale_k
    seq, seq_q = (0 if packed or one is None else one.shape[2] for one in (k, q))
    given: dict[str, Any] = {f"steps_{n}": _steps(lying[n], packed) for n in ("k", "v")}
    given |= {f"steps_{n}": _steps(lying[n], False) for n in ("k_cache", "v_cache")}
    if q is not None:
        out = call.out
        made = q.new_empty(q.shape, device=nowhere) if out is None else out
        given |= {"steps_q": _steps(q, packed), "steps_out": _steps(made, packed)}
    if scale is not None and scale.dim() == 3:
        given |= {f"steps_{n}": _three(lying[n].stride()) for n in ("scale_k", "scale_v")}
    elif scale is not None and scale.numel() > 1:
        given["head_step"] = 1  # they are contiguous, or copied
    if cos is not None:
        given |= {"positions": cos.shape[0], "rotary": 2 * cos.shape[1]}
        given |= {"step_cos": cos.stride(0), "step_sin": lying["sin"].stride(0)}
    return AttentionAppendProblem(
        batch=call.batch,
        kv_heads=cache.shape[1],
        heads=0 if q is None else q.shape[-2 if packed else 1],
        tokens=k.shape[0] if packed else call.batch * max(seq, seq_q),
        seq=seq,
        seq_q=seq_q,
        pages=cache.shape[0],
        page=cache.shape[2],
        columns=1 if table is None else table.shape[1],
        table_step=0 if table is None else table.stride(0),
        **given,
    )


def _steps(one: torch.Tensor, packed: bool) -> Steps:
    """The steps of sequence or page, of head, and of token or row."""
    strides = one.stride()
    return (0, strides[1], strides[0]) if packed else _three(strides)


def _three(strides: tuple[int, ...]) -> Steps:
    first, second, third = strides[:3]
    return first, second, third
