"""Caches of keys and values, and the lists and scales beside them: what kernels can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.errors import ProblemError
from warploom.runtime.elements import NAMES, name_of
from warploom.runtime.families._attention.operands import in_place

if TYPE_CHECKING:
    from warploom.runtime.families.attention_decode.call import AttentionDecodeCall


PAGES = (16, 32, 64, 128, 256)
QUANTIZED = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}


def check_types(call: AttentionDecodeCall) -> None:
    """Raise ProblemError for types of q, k and v that no kernel has."""
    q, k, v = call.q.dtype, call.k.dtype, call.v.dtype
    if NAMES.get(q) not in ("fp16", "bf16"):
        raise ProblemError(
            f"q of {q}", rule="must be fp16 or bf16", fix="convert with .to(torch.bfloat16)"
        )
    if k != v or (k != q and k not in QUANTIZED):
        raise ProblemError(
            f"q {q}, k {k}, v {v}",
            rule="k and v must have the type of q, or both be float8_e4m3fn or both int8",
            fix="pass a cache of bytes as .view(torch.float8_e4m3fn)",
        )


def check_places(call: AttentionDecodeCall) -> None:
    """Raise ProblemError for a cache that TMA cannot read where it lies: none is copied."""
    for name, tensor in (("k", call.k), ("v", call.v)):
        if tensor.numel() and not in_place(tensor):
            raise ProblemError(
                f"{name} at {tensor.data_ptr():#x} with strides {list(tensor.stride())}",
                rule="its last dimension is contiguous, its address and other strides are "
                "multiples of 16 bytes and not 0",
                fix="a cache is never copied: allocate it so, or pass .contiguous()",
            )


# ---- Lists ---------------------------------------------------------------------------------------


def page(k: torch.Tensor) -> int:
    """The keys of one page; ProblemError for a size that no kernel has."""
    found = k.shape[2]
    if found not in PAGES:
        raise ProblemError(
            f"pages of {found} keys in k {list(k.shape)}",
            rule=f"must be of {', '.join(map(str, PAGES))}, in [pages, kv_heads, page, dim]",
            fix="pass pages [pages, page, kv_heads, dim] as .transpose(1, 2)",
        )
    return found


def check_table(table: torch.Tensor, batch: int) -> None:
    """Raise ProblemError for a page table that is none."""
    right = table.dtype == torch.int32 and table.dim() == 2 and table.shape[0] == batch
    if not right or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ProblemError(
            f"page_table {list(table.shape)} {table.dtype} with strides {list(table.stride())}",
            rule=f"must be int32 [{batch}, pages of a sequence], its rows contiguous",
            fix="convert with .int(); a slice of a larger table needs no copy",
        )


def check_list(name: str, values: torch.Tensor, count: int | None) -> None:
    """Raise ProblemError for a list that does not have `count` numbers; None: at least one."""
    counted = values.shape[:1] >= (1,) if count is None else values.shape == (count,)
    fits = counted and values.dim() == 1 and values.is_contiguous()
    if values.dtype != torch.int32 or not fits:
        raise ProblemError(
            f"{name} {list(values.shape)} {values.dtype} with strides {list(values.stride())}",
            rule=f"must be int32 [{'batch + 1' if count is None else count}], contiguous",
            fix="a number for each sequence: convert with .int()"
            if count is not None and not name.startswith("cu_")
            else "a cumulative sum of lengths that begins with 0",
        )


def check_further(call: AttentionDecodeCall, heads: int) -> None:
    """Raise ProblemError for tensors beside the caches that do not go with them or with q."""
    _check_sinks(call, heads)
    _check_scales(call)


def _check_sinks(call: AttentionDecodeCall, heads: int) -> None:
    """Raise ProblemError for sinks that are not one score for each head of q."""
    sinks = call.sinks
    if sinks is None:
        return
    fits = sinks.shape == (heads,) and sinks.is_contiguous()
    if not fits or sinks.dtype not in (torch.float32, call.q.dtype):
        raise ProblemError(
            f"sinks {list(sinks.shape)} {sinks.dtype} with strides {list(sinks.stride())}",
            rule=f"must be [{heads}], contiguous, of float32 or {call.q.dtype}",
            fix="one score for each head of q, as the softmax sees it",
        )


# ---- Scales --------------------------------------------------------------------------------------


def _check_scales(call: AttentionDecodeCall) -> None:
    """Raise ProblemError for scales that the cache does not have, or lacks."""
    name = name_of(call.k.dtype, "k")
    given = {"scale_k": call.scale_k, "scale_v": call.scale_v}
    missing = [one for one, scale in given.items() if scale is None]
    if call.k.dtype not in QUANTIZED:
        if len(missing) < len(given):
            raise ProblemError(
                f"{' and '.join(one for one in given if one not in missing)} of {name} caches",
                rule="must be left out: only caches of e4m3 and int8 have scales",
                fix="`scale` is the factor of q k^T",
            )
        return
    if missing and (len(missing) == 1 or call.k.dtype == torch.int8):
        raise ProblemError(
            f"{name} caches without {' and '.join(missing)}",
            rule="must have both scales; those of e4m3 alone may both be left out, and are 1",
            fix="torch.ones((), device=q.device) is a scale of 1",
        )
    for one, scale in given.items():
        if scale is not None and (scale.dtype != torch.float32 or kind_of(scale, call.k) is None):
            per_token = list(call.k.shape[:-1])
            raise ProblemError(
                f"{one} {list(scale.shape)} {scale.dtype}",
                rule=f"must be float32 [] or [1], per head [{call.k.shape[1]}], or per token and "
                f"head {per_token}",
                fix="a scale for each token and head is indexed as the cache is, without dim",
            )


def kind_of(scale: torch.Tensor | None, k: torch.Tensor) -> str | None:
    """What has a scale of its own: `tensor`, `head` or `token`; None for shapes of neither."""
    if scale is None:
        return "tensor"
    if scale.shape == k.shape[:-1]:  # before those of a head, which has another rank
        return "token"
    if scale.dim() == 0 or scale.shape == (1,):
        return "tensor"
    return "head" if scale.shape == (k.shape[1],) else None
