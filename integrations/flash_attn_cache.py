"""FlashAttention's `flash_attn_with_kvcache`: new keys join a cache, then few query rows attend.

Steps of generation run `warploom.append_kv_cache` and `warploom.attention_decode`, which read the
cache where it lies. Longer queries, heads that these have no kernels for, and scores that slopes
change, attend to a cache in one piece by `warploom.attention`, as packed sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.integrations.flash_attn_call import Options, Window, named_tensor
from warploom.integrations.flash_attn_gradient import FlashLayout
from warploom.integrations.flash_attn_pages import Cache, Pair, Rotary
from warploom.runtime.families.attention_decode.api import attention_decode
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall
from warploom.runtime.families.attention_decode.extents import DIMS, ROWS, fits
from warploom.runtime.families.attention_forward.api import attention
from warploom.runtime.function import WarmCalls
from warploom.runtime.plan import planned
from warploom.runtime.tensors import launchable, shown


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | Pair:
    """Attention of q [batch, seq_q, heads, dim] to caches that k and v are written to first.

    As in FlashAttention 2.8. k_cache and v_cache are [batch, seq, heads_k, dim], fp16 or bf16.

    k, v               [batch, new, heads_k, dim]: written behind the first cache_seqlens keys
    rotary_cos, rotary_sin  [positions, rotary_dim / 2]: k is rotated by those of the positions that
                       it is written to; q likewise from cache_seqlens on where causal or windowed,
                       else all of its rows by those of position cache_seqlens
    cache_seqlens      int32 [batch], or an int: keys of each sequence before k. None: the cache's
    cache_batch_idx    int32 [batch]: which item of the cache each sequence has; the cache's seq is
                       a multiple of 16 then, and seq_q short
    cache_leftpad      int32 [batch]: the first key of each sequence
    block_table        int32 [batch, pages]: the pages of each sequence; caches are
                       [pages, page, heads_k, dim], with pages of a multiple of 16 rows
    alibi_slopes       as in `flash_attn_func`, for a cache in one piece
    num_splits         is ignored: the GPU itself splits the keys
    return_softmax_lse  return (out, softmax_lse), of which the second is as in `flash_attn_func`

    The others are those of `flash_attn_func`. There is no gradient. Raises ProblemError.
    """
    if type(rotary_interleaved) is not bool or type(return_softmax_lse) is not bool:
        require_boolean("rotary_interleaved", rotary_interleaved)
        require_boolean("return_softmax_lse", return_softmax_lse)
    values = (
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        cache_leftpad,
        block_table,
        softmax_scale,
        softcap,
        causal,
        window_size,
        alibi_slopes,
        *(cache_batch_idx, k, v, rotary_cos, rotary_sin),
    )
    if k is None and not torch.compiler.is_dynamo_compiling():
        results = _warm.again(values)
        if results is not None:
            return results if return_softmax_lse else results[0]
    options = Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False)
    keywords = options.keywords()
    cache = Cache.of(q, k_cache, v_cache, block_table, cache_batch_idx)
    lengths = _lengths(cache_seqlens, q, cache)
    short = not _is_sloped(keywords, cache) and _is_short(q, cache)
    if k is not None or v is not None:
        new = _new(q, cache, k, v, cache_seqlens)
        moving = causal or keywords["window"] is not None
        rotary = Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, moving=moving)
        q, lengths = cache.append(q, *new, lengths, rotary)
    elif rotary_cos is not None or rotary_sin is not None:
        raise ProblemError(
            "rotary_cos and rotary_sin without k and v",
            rule="must be None: what is rotated is k, and q with it",
            fix="pass k and v, or rotate q before the call",
        )
    if not short:
        out, lse = _by_attention(q.transpose(1, 2), cache, lengths, cache_leftpad, keywords)
        results = out.transpose(1, 2), lse
    else:
        read = _step(q, cache, lengths, cache_leftpad, keywords)
        out, lse = attention_decode(**read, return_lse=True)
        results = out.transpose(1, 2), lse
        if k is None and launchable(q, out):
            call = StepCall(**read)
            _warm.keep(values, call, planned(call), results)
    return results if return_softmax_lse else results[0]


def _is_short(q: torch.Tensor, cache: Cache) -> bool:
    """Whether `attention_decode` takes the call; ProblemError where neither function does."""
    _, rows, heads, dim = q.shape
    kv_heads = cache.k.shape[1]
    if fits(heads, kv_heads, rows, dim):
        return True
    if cache.table is None:
        return False
    raise ProblemError(
        f"{cache.said} with {rows} rows of {heads // max(1, kv_heads)} heads that share keys, "
        f"dim {dim}",
        rule=f"rows times heads that share keys must be at most {ROWS}, and dim one of "
        f"{', '.join(map(str, DIMS))}",
        fix="pass q in parts, each with the cache_seqlens that it ends at; or a cache in one "
        "piece, [batch, seq, heads_k, dim]",
    )


def _is_sloped(keywords: dict[str, Any], cache: Cache) -> bool:
    """Whether slopes change scores; ProblemError where keys are in pages, which only steps read."""
    if "alibi_slopes" not in keywords:
        return False
    if cache.table is None:
        return True
    raise ProblemError(
        f"{cache.said} with alibi_slopes",
        rule="must be None with slopes: a step adds nothing to its scores",
        fix="pass a cache in one piece, [batch, seq, heads_k, dim]",
    )


@dataclass(slots=True)
class StepCall(FlashLayout, AttentionDecodeCall):
    """A step of generation whose result is [batch, seq_q, heads, dim]."""


def _step(
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    leftpad: torch.Tensor | None,
    keywords: dict[str, Any],
) -> dict[str, Any]:
    """What `attention_decode` is called with for few rows."""
    return {
        "q": q.transpose(1, 2),
        "k": cache.k,
        "v": cache.v,
        "cache_seqlens": lengths,
        "cache_leftpad": leftpad,
        "page_table": cache.table,
        "causal": keywords["causal"] is not False,
        "window": keywords["window"],
        "softcap": keywords["softcap"],
        "scale": keywords["scale"],
    }


def _call_again(values: tuple[Any, ...]) -> StepCall:
    q, k, v, lengths, starts, table, scale, softcap, causal, window, *_ = values
    keywords = Options(0.0, scale, causal, window, softcap, None, False).keywords()
    return StepCall(**_step(q, Cache.of(q, k, v, table, None), lengths, starts, keywords))


_warm: WarmCalls[Pair] = WarmCalls(
    (
        *("q", "k", "v", "cache_seqlens", "cache_leftpad", "page_table", "scale", "softcap"),
        *("causal", "window", "alibi_slopes", "batch_idx", "k_new", "v_new", "cos", "sin"),
    ),
    AttentionDecodeCall.declaration,
    _call_again,
)


def _by_attention(
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    leftpad: torch.Tensor | None,
    keywords: dict[str, Any],
) -> Pair:
    """The same, of a cache in one piece that is packed where it lies.

    Keys before the first and behind the last of a sequence are sequences without queries.
    """
    batch, heads, rows, dim = q.shape
    keys = cache.k.shape[2]
    ends = lengths.clamp(0, keys)
    first = torch.zeros_like(ends) if leftpad is None else torch.minimum(leftpad, ends)
    none = torch.zeros_like(ends)
    of_k = torch.stack([first, ends - first, keys - ends], 1)
    of_q = torch.stack([none, none + rows, none], 1)
    q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (q, cache.k, cache.v))
    slopes = keywords.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        keywords = {**keywords, "alibi_slopes": slopes.repeat_interleave(3, 0)}
    out, lse = attention(
        *(q, k, v),
        **keywords,
        cu_seqlens_q=_offsets(of_q),
        cu_seqlens_k=_offsets(of_k),
        max_seqlen_q=rows,
        max_seqlen_k=keys,
        return_lse=True,
    )
    shape = (batch, rows, heads, dim)
    return out.view(shape).transpose(1, 2), lse.view(heads, batch, rows).transpose(0, 1)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return [0, lengths summed up ...] as int32."""
    return torch.nn.functional.pad(lengths.flatten().cumsum(0, dtype=torch.int32), (1, 0))


# ---- Arguments -----------------------------------------------------------------------------------


def _lengths(given: int | torch.Tensor | None, q: torch.Tensor, cache: Cache) -> torch.Tensor:
    """How many keys each sequence has before new ones: int32 [batch], where q is."""
    if isinstance(given, torch.Tensor):
        if given.dtype == torch.int32 and given.shape == q.shape[:1]:
            return given
        raise ProblemError(
            f"cache_seqlens {list(given.shape)} of {given.dtype}",
            rule=f"must be int32 [{q.shape[0]}], a number for each sequence, or an int",
            fix="convert with .int()",
        )
    if given is None:
        pages = 1 if cache.table is None else cache.table.shape[1]
        given = pages * cache.k.shape[2]
    if not isinstance(given, int) or isinstance(given, bool):
        raise ProblemError(
            f"cache_seqlens {shown(given)} of type {type(given).__name__}",
            rule="must be int32 [batch], an int, or None: all keys of the cache",
            fix="torch.tensor(..., dtype=torch.int32, device=q.device)",
        )
    return torch.full(q.shape[:1], given, dtype=torch.int32, device=q.device)


def _new(
    q: torch.Tensor,
    cache: Cache,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: object,
) -> Pair:
    """The new keys and values, [batch, heads_k, new, dim]."""
    tensors = named_tensor("k", k), named_tensor("v", v)
    rest = (cache.k.shape[1], cache.k.shape[3])
    for name, one in zip("kv", tensors, strict=True):
        fits = one.dim() == 4 and one.shape[0] == q.shape[0] and tuple(one.shape[2:]) == rest
        if not fits or one.shape != tensors[0].shape:
            raise ProblemError(
                f"{name} {list(one.shape)}",
                rule=f"must be [{q.shape[0]}, new, {rest[0]}, {rest[1]}], as q and the cache are",
                fix="k and v have one shape",
            )
    if cache_seqlens is None:
        raise ProblemError(
            "k and v without cache_seqlens",
            rule="must come with the number of keys that the cache has already, after which they "
            "are written",
            fix="pass cache_seqlens, int32 [batch] or an int",
        )
    return tensors[0].transpose(1, 2), tensors[1].transpose(1, 2)
