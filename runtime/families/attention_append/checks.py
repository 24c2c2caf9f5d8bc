"""What the tensors of a call must be, whatever their contents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.errors import ProblemError
from warploom.runtime.operands import LOAD, loadable, refuse_repeated
from warploom.runtime.tensors import require_one_device, shown

if TYPE_CHECKING:
    from warploom.runtime.families.attention_append.call import AttentionAppendCall

SIXTEENTHS = 16  # that the numbers of a row, and of what is turned, are a multiple of
LONGEST = 512  # numbers of a row
CACHES = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}


def check(call: AttentionAppendCall) -> None:
    """Raise ProblemError for tensors that do not fit each other."""
    require_one_device([(n, one) for n, one in call.named() if isinstance(one, torch.Tensor)])
    _check_new(call)
    _check_caches(call)
    _check_sequences(call)
    _check_rotary(call)
    _check_scales(call)
    _check_written(call)


def _require_shape(name: str, one: torch.Tensor, wanted: tuple[int, ...], beside: str) -> None:
    if one.shape != wanted:
        raise ProblemError(
            f"{name} {list(one.shape)}",
            rule=f"must be {list(wanted)} with {beside}",
            fix=f"transpose, slice or expand {name}",
        )


def _require_type(name: str, one: torch.Tensor, *wanted: torch.dtype) -> None:
    if one.dtype not in wanted:
        listed = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
        raise ProblemError(f"{name} {one.dtype}", rule=f"must be {listed}", fix=f"convert {name}")


def _check_new(call: AttentionAppendCall) -> None:
    """Of k, v and q."""
    k, packed = call.k, call.cu_seqlens is not None
    _require_type("k", k, torch.float16, torch.bfloat16)
    form = "[tokens, kv_heads, dim] with cu_seqlens" if packed else "[batch, kv_heads, seq, dim]"
    if k.dim() != 4 - packed:
        fix = "transpose or flatten it" if packed else "pass cu_seqlens with packed k and v"
        raise ProblemError(f"k {list(k.shape)}", rule=f"must be {form}", fix=fix)
    dim = k.shape[-1]
    if not dim or dim % SIXTEENTHS or dim > LONGEST:
        raise ProblemError(
            f"k {list(k.shape)}",
            rule=f"must have rows of a multiple of {SIXTEENTHS} numbers, at most {LONGEST}",
            fix="pad the last dimension",
        )
    _require_shape("v", call.v, tuple(k.shape), f"k {list(k.shape)}")
    _require_type("v", call.v, k.dtype)
    q = call.q
    if q is None:
        return
    _require_type("q", q, k.dtype)
    if q.dim() != k.dim() or q.shape[0] != k.shape[0] or q.shape[-1] != dim:
        form = form.replace("kv_heads", "heads").replace(" seq,", " seq_q,")
        rule = f"must be {form}, as k {list(k.shape)} is"
        raise ProblemError(f"q {list(q.shape)}", rule=rule, fix="transpose or slice q")


def _check_caches(call: AttentionAppendCall) -> None:
    k, first = call.k, call.k_cache
    kv_heads = k.shape[-2 if call.cu_seqlens is not None else 1]
    for name, one in (("k_cache", first), ("v_cache", call.v_cache)):
        _require_type(name, one, k.dtype, *CACHES)
        if one.dim() != 4 or (one.shape[1], one.shape[3]) != (kv_heads, k.shape[-1]):
            of = "batch" if call.page_table is None else "pages"
            raise ProblemError(
                f"{name} {list(one.shape)}",
                rule=f"must be [{of}, {kv_heads}, rows, {k.shape[-1]}] with k {list(k.shape)}",
                fix="transpose a cache whose rows come before heads: .transpose(1, 2)",
            )
        if not loadable(one):
            raise ProblemError(
                f"{name} with strides {list(one.stride())}",
                rule="must have a contiguous last dimension, and an address and other strides that "
                f"are multiples of {LOAD} bytes",
                fix="allocate it with such strides: it is written in place",
            )
        refuse_repeated(name, one)
    _require_shape("v_cache", call.v_cache, tuple(first.shape), f"k_cache {list(first.shape)}")
    _require_type("v_cache", call.v_cache, first.dtype)


def _check_sequences(call: AttentionAppendCall) -> None:
    """Of what says where new rows go."""
    cu_seqlens, table, batch = call.cu_seqlens, call.page_table, call.batch
    if cu_seqlens is not None:
        _require_type("cu_seqlens", cu_seqlens, torch.int32)
        if cu_seqlens.dim() != 1 or batch < 1:
            raise ProblemError(
                f"cu_seqlens {list(cu_seqlens.shape)}",
                rule="must be [batch + 1], of a sequence at least",
                fix="torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) makes it",
            )
    beside = f"{'k' if cu_seqlens is None else 'cu_seqlens'} of {batch} sequences"
    for name, one in (("lengths", call.lengths), ("lengths_after", call.lengths_after)):
        if one is not None:
            _require_type(name, one, torch.int32)
            _require_shape(name, one, (batch,), beside)
    if table is None:
        if call.k_cache.shape[0] != batch:
            raise ProblemError(
                f"k_cache {list(call.k_cache.shape)} of {batch} sequences",
                rule="must be a row of caches for each, without a page table",
                fix="slice it, or say by page_table which is whose",
            )
        return
    _require_type("page_table", table, torch.int32)
    if table.dim() != 2 or table.shape[0] != batch or not call.k_cache.shape[2]:
        raise ProblemError(
            f"page_table {list(table.shape)}, k_cache {list(call.k_cache.shape)}",
            rule=f"must be [{batch}, pages of a sequence], of pages with rows",
            fix="transpose or slice it",
        )


def _check_rotary(call: AttentionAppendCall) -> None:
    cos, sin, k = call.cos, call.sin, call.k
    if cos is None or sin is None:
        if cos is not sin or call.interleaved or call.q is not None:
            raise ProblemError(
                "one of cos and sin without the other",
                rule="must be passed together, and are needed by q and by interleaved",
                fix="pass both, or neither: without them nothing is rotated",
            )
        return
    _require_type("cos", cos, torch.float32, k.dtype)
    _require_type("sin", sin, cos.dtype)
    half = cos.shape[-1] if cos.dim() == 2 else 0
    if not (half and cos.shape[0]) or half % (SIXTEENTHS // 2) or 2 * half > k.shape[-1]:
        raise ProblemError(
            f"cos {list(cos.shape)}",
            rule=f"must be [positions, rotary / 2], rotary a multiple of {SIXTEENTHS}, at most "
            f"{k.shape[-1]}",
            fix="slice tables that repeat themselves: [:, : rotary // 2]",
        )
    _require_shape("sin", sin, tuple(cos.shape), f"cos {list(cos.shape)}")


def _check_scales(call: AttentionAppendCall) -> None:
    k, v, cache = call.scale_k, call.scale_v, call.k_cache
    if k is None or v is None:
        if k is not v:
            rule = "must be given together"
            raise ProblemError("scale_k and scale_v that are not both there", rule=rule, fix="")
        if cache.dtype == torch.int8:
            raise ProblemError(
                "caches in int8 without scales",
                rule="must have scale_k and scale_v, by which values become int8",
                fix="pass a scale for each head, or tensors for one of each token and head",
            )
        return
    if cache.dtype not in CACHES:
        raise ProblemError(
            f"scales of caches in {cache.dtype}",
            rule="must be left out: only caches of 8 bits have any",
            fix="leave them out",
        )
    token = tuple(cache.shape[:3])
    for name, one in (("scale_k", k), ("scale_v", v)):
        _require_type(name, one, torch.float32)
        if tuple(one.shape) not in ((), (1,), (cache.shape[1],), token):
            raise ProblemError(
                f"{name} {list(one.shape)}",
                rule=f"must be one number, [{cache.shape[1]}] for the heads, or {list(token)} "
                "for each row, which is written",
                fix=f"reshape {name}",
            )
    if (k.dim() == 3, k.numel()) != (v.dim() == 3, v.numel()):
        raise ProblemError(
            f"scale_k {list(k.shape)}, scale_v {list(v.shape)}",
            rule="must be of one shape",
            fix="expand the smaller one",
        )
    if k.dim() == 3:
        refuse_repeated("scale_k", k)
        refuse_repeated("scale_v", v)


def _check_written(call: AttentionAppendCall) -> None:
    """Of `out` and `lengths_after`."""
    out, q, after = call.out, call.q, call.lengths_after
    if after is not None and not after.is_contiguous():
        raise ProblemError(
            f"lengths_after with strides {list(after.stride())}",
            rule="must be contiguous",
            fix="allocate it so",
        )
    if out is None:
        return
    if q is None:
        raise ProblemError("out without q", rule="must be left out: it is q, turned", fix="pass q")
    _require_shape("out", out, tuple(q.shape), f"q {list(q.shape)}")
    refuse_repeated("out", out)
    if out.dtype != q.dtype or not loadable(out):
        raise ProblemError(
            f"out {shown(out.dtype)} with strides {list(out.stride())}",
            rule=f"must be {q.dtype}, with a contiguous last dimension, at an address and with "
            f"other strides that are multiples of {LOAD} bytes",
            fix="leave it out to have it made",
        )
