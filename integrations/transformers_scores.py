"""What layers of transformers' models change scores by, in the words of `warploom.attention`.

These are masks as tensors, which are made where bounds do not say a mask, biases by position, and
what `Arguments.of_scores` has. A mask and a bias are [1 or batch, 1 or heads, rows, keys]; a mask
is boolean or, as for eager attention, added to scores.
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.integrations import sdpa_mask
from warploom.integrations.bounds import Bounds
from warploom.integrations.linear_rules import product_type
from warploom.integrations.torch_attention import Arguments
from warploom.integrations.transformers_masks import BoundedMask


def told(
    attention_mask: torch.Tensor | BoundedMask | None, bounds: Bounds | None, call: Arguments
) -> tuple[Bounds | None, torch.Tensor | None]:
    """The bounds that kernels take, and the mask beside them; no bounds where torch computes.

    A bias is of the rows and keys of a batch, not of the sequences that bounds make of it: with one
    a mask of sequences is a tensor.
    """
    whole = Bounds(call.key.shape[2], causal=False)
    if isinstance(attention_mask, torch.Tensor):
        return whole, attention_mask
    if bounds is None or bounds.sequences is None or call.bias is None:
        return bounds, None
    if attention_mask is None or attention_mask.bounds is not bounds:  # told by cu_seq_lens
        return None, None
    return whole, attention_mask.tensor()


def read(call: Arguments, mask: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """All tensors of a call."""
    return call.tensors if mask is None else (*call.tensors, mask)


def of_rows(call: Arguments) -> str | None:
    """Why torch computes an attention with sinks of each row, if it has them."""
    per_row = call.sinks is not None and call.sinks.dim() > 1
    return "its sinks are one for each row and head, not one for each head" if per_row else None


def refusal(call: Arguments, mask: torch.Tensor | None) -> str | None:
    """Why torch computes an attention with these masks and biases, if it does."""
    if mask is not None:
        found = sdpa_mask.misfit(mask, call.query, call.key, is_causal=False)
        if found is not None:
            return found
    added = [one for one in (mask, call.bias) if one is not None]
    if call.softcap is not None and any(one.requires_grad for one in added):
        return "a bias has a gradient without softcap only"
    return of_rows(call)


def keywords(call: Arguments, mask: torch.Tensor | None, keys: int) -> dict[str, Any]:
    """The keywords for a call that is not refused, of which `keys` keys are attended to."""
    found = sdpa_mask.keywords(mask)
    if call.bias is not None:
        bias = call.bias[..., :keys]
        found["bias"] = bias + found["bias"] if "bias" in found else bias
    element = product_type(call.query.dtype, call.query.device.type)
    return {**found, **call.of_scores(element)}
