"""Torch's `attn_mask`, of truth values or added to scores, in the words of `warploom.attention`."""

from __future__ import annotations

import math

import torch

_SCORES = 4  # dimensions of scores: batch, heads, rows, keys


def misfit(
    attn_mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *, is_causal: bool
) -> str | None:
    """Why torch computes an attention with such a mask, if it does.

    query and key are [.., heads, length, dim], and fit each other.
    """
    if is_causal:
        return "attn_mask and is_causal exclude each other"
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return f"attn_mask is {attn_mask.dtype}: not bool, fp32 or as query"
    if attn_mask.device != query.device:
        return f"attn_mask is on {attn_mask.device}"
    scores = (*query.shape[:-1], key.shape[-2])
    aligned = zip(attn_mask.shape[::-1], scores[::-1], strict=False)
    beyond = attn_mask.dim() > len(scores)
    if beyond or any(one not in (1, extent) for one, extent in aligned):
        return f"attn_mask {list(attn_mask.shape)} does not broadcast to scores {list(scores)}"
    own, all_of = attn_mask.shape[:-3], scores[:-3]
    if own not in ((), all_of) and math.prod(own) != 1:
        return f"attn_mask {list(attn_mask.shape)} is of some dimensions of batches {list(all_of)}"
    return None


def keywords(attn_mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The keywords for a mask that fits, whose batches are folded into one dimension."""
    if attn_mask is None:
        return {}
    if attn_mask.dim() > _SCORES:
        attn_mask = attn_mask.flatten(0, -_SCORES)
    return {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}
