"""The sizes of a call of `warploom.attention_decode`: what its tensors say of each other.

Queries are [batch, heads, seq_q, dim] or packed [total, heads, dim]; keys and values are fixed
[batch, kv_heads, seq_k, dim], packed [total, kv_heads, dim] or paged [pages, kv_heads, page, dim].
Nothing here reads a tensor's contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from warploom.errors import ProblemError
from warploom.runtime.families._attention import problem as attention
from warploom.runtime.families.attention_decode import cache
from warploom.runtime.tensors import require_one_device

if TYPE_CHECKING:
    from warploom.runtime.families.attention_decode.call import AttentionDecodeCall


DIMS = (64, 96, 128, 256)
ROWS = 256  # query rows times the heads that share one of k and v, at most

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
    cache.check_types(call)
    q, k, table = call.q, call.k, call.page_table
    if call.cu_seqlens_q is not None:
        cache.check_list("cu_seqlens_q", call.cu_seqlens_q, None)
        batch, total_q = call.cu_seqlens_q.shape[0] - 1, q.shape[0]
        seq_q = min(call.max_seqlen_q or 0, total_q)
    else:
        batch, total_q = q.shape[0], q.shape[2]
        seq_q = total_q
    page, pages = 0, 0
    total_k = k.shape[0 if keys == "packed" else 2]
    seq_k = total_k
    if table is not None:
        cache.check_table(table, batch)
        pages, page = k.shape[0], cache.page(k)
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
            cache.check_list(name, values, count)
    if call.max_seqlen_k is not None:
        seq_k = min(seq_k, call.max_seqlen_k)
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[-1]
    _check_heads(heads, kv_heads, dim, seq_q)
    cache.check_further(call, heads)
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
