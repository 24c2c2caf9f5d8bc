"""Decoding in torch: sdpa on caches that were gathered and dequantized before, where it needs that.

torch has no paged caches and none of 8 bits: what it takes for these is less than a program would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from warploom.generator.families._attention import UNBOUNDED
from warploom.generator.families.attention_decode import DecodeOperation
from warploom.runtime.baselines import Baseline
from warploom.runtime.families._attention import sdpa
from warploom.runtime.families._attention.sdpa import Operands, Scores
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall

_PLAIN = {"queries": "fixed", "keys": "fixed", "starts": False}


def baselines(operation: DecodeOperation, sets: Sequence[AttentionDecodeCall]) -> list[Baseline]:
    """Every backend, and flex_attention."""
    scores = _scores(operation, sets[0])
    given = [_dense(one) for one in sets] if not scores.refused else [(one.q,) * 3 for one in sets]
    found = sdpa.baselines(scores, given)
    same = operation.cache == "same" and not operation.page
    told = "" if same else ", of a 16-bit cache in one piece"
    return [replace(one, name=f"{one.name}{told}") for one in found]


def _scores(operation: DecodeOperation, call: AttentionDecodeCall) -> Scores:
    """What counts: each sequence has all keys that it may have, as samples are drawn."""
    unlike = [name for name, value in _PLAIN.items() if getattr(operation, name) != value]
    modifiers = call.plain.modifiers
    unlike += [one.argument for one in modifiers if not one.flex]
    if operation.scales == "token":
        unlike.append("scales of tokens")
    if unlike:
        return Scores(refused=f"not measured with {', '.join(unlike)}")
    if operation.mask == "none":
        return Scores(modifiers=modifiers)
    keys = call.max_seqlen_k if call.page_table is not None else call.k.shape[2]
    last = int(keys or 0) - call.q.shape[2]  # the key that the first row stands at
    left = UNBOUNDED if call.window is None else int(call.window[0] or 0) - last
    if operation.mask == "causal" and call.q.shape[2] == 1:
        return Scores(modifiers=modifiers)
    return Scores(left, last, modifiers=modifiers)


def _dense(call: AttentionDecodeCall) -> Operands:
    """q, and k and v as [batch, kv_heads, keys, dim] in its type."""
    k, v = (
        _wide(call, one, scale) for one, scale in ((call.k, call.scale_k), (call.v, call.scale_v))
    )
    return call.q, k, v


def _wide(
    call: AttentionDecodeCall, cache: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    table = call.page_table
    if table is not None:
        kv_heads, dim = cache.shape[1], cache.shape[3]
        pages = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        found = pages[table.long()].transpose(1, 2).reshape(len(table), kv_heads, -1, dim)
        cache = found.view(cache.dtype)[:, :, : call.max_seqlen_k]
    if scale is None and cache.dtype == call.q.dtype:
        return cache
    wide = cache.float()
    if scale is not None:
        wide = wide * scale.reshape(-1, 1, 1)
    return wide.to(call.q.dtype)
