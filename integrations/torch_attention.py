"""An attention in torch's own kernels: what runs where Warploom has none, with every extra."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Arguments:
    """The operands of an attention, and what is done to its scores.

    query is [batch, heads, rows, dim], key [batch, kv_heads, keys, dim], value [batch, kv_heads,
    keys, value_dim]. `softcap` bounds scores, `sinks` [heads] are one more score of each row, or
    [batch, heads, rows, 1], which only torch computes; `bias` [1 or batch, heads, rows, keys] is
    added to scores.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dropout: float = 0.0
    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the scores are what torch's kernels take the softmax of, but for masks."""
        return self.softcap is None and self.sinks is None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the call."""
        given = (self.query, self.key, self.value, self.bias, self.sinks)
        return tuple(one for one in given if one is not None)

    def of_scores(self, element: torch.dtype) -> dict[str, Any]:
        """What Warploom's functions, which compute in `element`, are told of the scores."""
        sinks = self.sinks
        if sinks is not None:
            sinks = (sinks if sinks.dtype == element else sinks.float()).contiguous()
        return {"softcap": self.softcap, "sinks": sinks}


def attention(call: Arguments, mask: torch.Tensor | None, *, causal: bool) -> torch.Tensor:
    """Return the attention [batch, heads, rows, value_dim] of torch's own kernels.

    `mask` is bool (True: attended to) or added to the scores, [1 or batch, 1 or heads, rows, keys].
    Without one, `causal` lets row i attend to keys 0 to i.
    """
    mask, causal = _masked(call, mask, causal=causal)
    if not call.plain:
        return _composite(call, _lower_triangle(call) if causal else mask)
    query, key, value = call.query, call.key, call.value
    groups = query.shape[1] // key.shape[1]
    rows = query.shape[2]
    together = groups > 1 and rows == 1 and mask is not None and query.shape[0] == key.shape[0]
    if together:  # the heads of a group are the rows of one head
        query = query.reshape(query.shape[0], key.shape[1], groups, query.shape[3])
        mask = _of_groups(mask, groups)
    elif groups > 1 and mask is not None and query.is_cuda:
        # With a mask, torch's fast kernels take no groups of heads.
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=call.dropout,
        scale=call.scale,
        is_causal=causal,
        enable_gqa=bool(query.shape[1] != key.shape[1]),  # a tensor where torch.jit traces
    )
    return out.reshape(out.shape[0], -1, rows, out.shape[3]) if together else out


def _of_groups(mask: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """Turn a mask of one row of each head into that of the rows that a group's heads become."""
    if mask is None or mask.dim() < 4 or mask.shape[1] == 1:
        return mask
    return mask.reshape(mask.shape[0], mask.shape[1] // groups, groups, mask.shape[3])


def _masked(
    call: Arguments, mask: torch.Tensor | None, *, causal: bool
) -> tuple[torch.Tensor | None, bool]:
    """Put the bias into the mask; return it, and whether the kernel has to apply causality."""
    if call.bias is None:
        return mask, causal and mask is None
    bias = call.bias[..., : call.key.shape[2]].to(call.query.dtype)
    if mask is None and causal:
        mask = _lower_triangle(call)
    if mask is None:
        return bias.contiguous(), False
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -torch.inf).contiguous(), False
    return (bias + mask).contiguous(), False


def _lower_triangle(call: Arguments) -> torch.Tensor:
    rows, keys = call.query.shape[2], call.key.shape[2]
    return torch.ones(rows, keys, dtype=torch.bool, device=call.query.device).tril()[None, None]


def _composite(call: Arguments, mask: torch.Tensor | None) -> torch.Tensor:
    """Return what torch's kernels cannot: capped scores and sinks. Scores are in memory."""
    batch, heads, rows, dim = call.query.shape
    groups = (batch, call.key.shape[1], heads // call.key.shape[1], rows)
    scores = (call.query.reshape(*groups, dim) @ call.key[:, :, None].mT).flatten(1, 2).float()
    scores = scores * (dim**-0.5 if call.scale is None else call.scale)
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if call.sinks is None:
        hidden = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(hidden, 0), -1).masked_fill(hidden, 0)
    else:
        sinks = call.sinks if call.sinks.dim() > 1 else call.sinks.reshape(1, -1, 1, 1)
        sinks = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    weights = functional.dropout(weights, call.dropout).to(call.value.dtype)
    return (weights.reshape(*groups, -1) @ call.value[:, :, None]).flatten(1, 2)
