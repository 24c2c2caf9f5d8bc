"""The sizes of a call of `warploom.attention_decode`, and whether kernels can read its tensors.

Queries are [batch, heads, seq_q, dim] or packed [total, heads, dim]; keys and values are fixed
[batch, kv_heads, seq_k, dim], packed [total, kv_heads, dim] or paged [pages, kv_heads, page, dim].
Only `check_contents` reads a tensor's contents.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from warploom.errors import ProblemError
from warploom.runtime.elements import NAMES, name_of
from warploom.runtime.families._attention import problem as attention
from warploom.runtime.families._attention.operands import in_place
from warploom.runtime.tensors import require_one_device, shown

if TYPE_CHECKING:
    from warploom.runtime.families.attention_decode.call import AttentionDecodeCall


DIMS = (64, 96, 128, 256)
ROWS = 256  # query rows times the heads that share one of k and v, at most

PAGES = (16, 32, 64, 128, 256)
QUANTIZED = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}

Keys = Literal["fixed", "packed", "paged"]
_RANKS = {
    "fixed": "[batch, kv_heads, seq_k, dim]",
    "packed": "[total, kv_heads, dim]",
    "paged": "[pages, kv_heads, page, dim]",
}


@dataclass(frozen=True, slots=True)
class Extents(attention.Extents):
    """The sizes of a call; `packed` is said of queries.

    seq_q, seq_k  the most that a sequence may have
    total_k       keys in memory: of all packed sequences, of all pages, else of one sequence
    page, pages   keys of a page, and pages in memory; 0 where keys are not paged
    """

    keys: Keys = "fixed"
    page: int = 0
    pages: int = 0


def extents(call: AttentionDecodeCall) -> Extents:
    """Return the sizes of a call, or raise ProblemError for tensors that do not go together."""
    call.require()
    require_one_device(call.read())
    packed, keys = call.cu_seqlens_q is not None, _keys(call)
    _check_ranks(call, keys, packed=packed)
    check_types(call)
    q, k, table = call.q, call.k, call.page_table
    if call.cu_seqlens_q is not None:
        check_list("cu_seqlens_q", call.cu_seqlens_q, None)
        batch, total_q = call.cu_seqlens_q.shape[0] - 1, q.shape[0]
        seq_q = min(call.max_seqlen_q or 0, total_q)
    else:
        batch, total_q = q.shape[0], q.shape[2]
        seq_q = total_q
    page, pages = 0, 0
    total_k = k.shape[0 if keys == "packed" else 2]
    seq_k = total_k
    if table is not None:
        check_table(table, batch)
        pages, page = k.shape[0], page_of(k)
        seq_k, total_k = table.shape[1] * page if pages else 0, pages * page
    elif keys == "fixed" and k.shape[0] != batch:
        raise ProblemError(
            f"k {list(k.shape)} for {batch} sequences of q",
            rule=f"must be {_RANKS['fixed']}, of the sequences of q",
            fix="caches of pages come with a page_table, packed keys with cu_seqlens_k",
        )
    for name, values, count in (
        ("cache_seqlens", call.cache_seqlens, batch),
        ("cache_leftpad", call.cache_leftpad, batch),
        ("cu_seqlens_k", call.cu_seqlens_k, batch + 1),
    ):
        if values is not None:
            check_list(name, values, count)
    if call.max_seqlen_k is not None:
        seq_k = min(seq_k, call.max_seqlen_k)
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[-1]
    _check_heads(heads, kv_heads, dim, seq_q)
    check_scales(call)
    plain = call.plain
    for modifier in plain.modifiers:
        modifier.check(plain, (batch, heads, seq_q, seq_k))
    return Extents(
        *(batch, heads, kv_heads, seq_q, seq_k, dim, total_q, total_k, packed), keys, page, pages
    )


def _keys(call: AttentionDecodeCall) -> Keys:
    """How the keys lie; ProblemError for lists that do not go together."""
    if call.cu_seqlens_k is None:
        return "fixed" if call.page_table is None else "paged"
    others = {"cache_seqlens": call.cache_seqlens, "page_table": call.page_table}
    beside = [name for name, tensor in others.items() if tensor is not None]
    if beside:
        raise ProblemError(
            f"cu_seqlens_k together with {' and '.join(beside)}",
            rule="must be passed alone: it determines where the keys of each sequence begin and "
            "end",
            fix="leave it out for caches, which have cache_seqlens",
        )
    return "packed"


def _check_ranks(call: AttentionDecodeCall, keys: Keys, *, packed: bool) -> None:
    q, k, v = call.q, call.k, call.v
    if packed is (call.max_seqlen_q is None):
        raise ProblemError(
            f"{'cu_seqlens_q' if packed else 'max_seqlen_q'} alone",
            rule="packed queries take cu_seqlens_q and max_seqlen_q",
            fix="the most rows of a sequence is an int, so that no call waits for the GPU",
        )
    ranks = {"q": "[total, heads, dim]" if packed else "[batch, heads, seq_q, dim]"}
    ranks |= {"k": _RANKS[keys], "v": _RANKS[keys]}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != ranks[name].count(",") + 1:
            raise ProblemError(
                f"{name} {list(tensor.shape)}",
                rule=f"must be {ranks[name]}",
                fix="packed tensors come with cu_seqlens, caches of pages with a page_table",
            )
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise ProblemError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            rule="k and v must have one shape, and the dim of q",
            fix=f"give views that are {_RANKS[keys]}: .transpose(1, 2) swaps heads and rows",
        )


def fits(heads: int, kv_heads: int, seq_q: int, dim: int) -> bool:
    """Whether kernels have so many rows of so many columns."""
    return dim in DIMS and heads // max(1, kv_heads) * seq_q <= ROWS


def _check_heads(heads: int, kv_heads: int, dim: int, seq_q: int) -> None:
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ProblemError(
            f"{heads} heads of q over {kv_heads} of k and v",
            rule="the heads of q must be a multiple of those of k and v",
            fix="consecutive heads of q share one of k and v; of pages whose heads come after "
            "their rows, pass .transpose(1, 2)",
        )
    if fits(heads, kv_heads, seq_q, dim):
        return
    if dim not in DIMS:
        raise ProblemError(
            f"dim {dim}",
            rule=f"a head dimension must be one of {', '.join(map(str, DIMS))}",
            fix="warploom.attention takes any multiple of 8, of keys that are not paged",
        )
    group = heads // max(1, kv_heads)
    raise ProblemError(
        f"{seq_q} query rows of {group} heads that share keys: {group * seq_q}",
        rule=f"rows times heads that share keys must be at most {ROWS}",
        fix="pass the queries in parts, each with the lengths that it ends at, or use "
        "warploom.attention, which is faster for many rows",
    )


# ---- Caches --------------------------------------------------------------------------------------


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


def page_of(k: torch.Tensor) -> int:
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


# ---- Scales --------------------------------------------------------------------------------------


def check_scales(call: AttentionDecodeCall) -> None:
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


# ---- Contents ------------------------------------------------------------------------------------


def check_contents(call: AttentionDecodeCall, sizes: Extents) -> None:
    """Raise ProblemError for lengths, pages or offsets that lead out of their tensors."""
    if call.cu_seqlens_q is not None:
        longest = call.max_seqlen_q or 0
        _check_offsets("q", call.cu_seqlens_q, sizes.total_q, longest)
    if call.cu_seqlens_k is not None:
        _check_offsets("k", call.cu_seqlens_k, sizes.total_k, sizes.seq_k)
    lengths = [sizes.seq_k] * sizes.batch
    if call.cache_seqlens is not None:
        lengths = call.cache_seqlens.tolist()
        if any(not 0 <= length <= sizes.seq_k for length in lengths):
            raise ProblemError(
                f"cache_seqlens {shown(lengths)}",
                rule=f"must be between 0 and {sizes.seq_k}, the keys that the cache holds",
                fix="count the keys of each sequence, its new ones included, in whole pages of its "
                "row of the table",
            )
    if call.page_table is not None:
        _check_pages(call.page_table, lengths, sizes)


def _check_pages(table: torch.Tensor, lengths: list[int], sizes: Extents) -> None:
    for index, (row, length) in enumerate(zip(table.tolist(), lengths, strict=True)):
        used = row[: -(-length // sizes.page)]
        outside = [page for page in used if not 0 <= page < sizes.pages]
        if outside:
            raise ProblemError(
                f"page {outside[0]} in row {index} of page_table",
                rule=f"must be one of the cache's {sizes.pages} pages, 0 to {sizes.pages - 1}",
                fix="entries past a sequence's length may be anything",
            )


def _check_offsets(name: str, offsets: torch.Tensor, rows: int, longest: int) -> None:
    starts = offsets.tolist()
    lengths = [after - before for before, after in itertools.pairwise(starts)]
    if starts[0] != 0 or min(lengths, default=0) < 0 or starts[-1] > rows:
        raise ProblemError(
            f"cu_seqlens_{name} {shown(starts)} over {rows} rows",
            rule="must begin with 0, never decrease, and end at no more than the rows",
            fix="a cumulative sum of lengths that begins with 0",
        )
    if max(lengths, default=0) > longest:
        raise ProblemError(
            f"max_seqlen_{name} {longest}",
            rule=f"must be at least the longest sequence, {max(lengths)}",
            fix="pass the largest length of a sequence, or any larger number",
        )
