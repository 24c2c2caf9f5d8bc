"""Torch's memory-efficient attention where it has a mask, run by Warploom's kernels if they fit.

torch picks it for masks that require grad, of which no other operator has the gradient. Without a
mask it runs torch's own kernel. Results lie as torch's do: heads inside of rows, a log-sum-exp of
32 rows or a multiple for each head, +inf for those that there are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from warploom.integrations import sdpa_biased as biased
from warploom.integrations.sdpa_calls import Operator

NAME = "aten::_scaled_dot_product_efficient_attention"
OPERATORS = (NAME, f"{NAME}_backward")
EFFICIENT = Operator(NAME, "top_left", (), (), torch.int64)
_ROWS = 32

Optional = torch.Tensor | None
Wanted = tuple[Optional, Optional, Optional, Optional]


@dataclass(frozen=True)
class Override:
    """The implementations; `run_torch` runs torch's own kernel of an operator."""

    run_torch: Callable[..., Any]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: Optional,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The operator; where no log-sum-exp is asked for, it has no row."""
        given = (query, key, value)
        masked = None
        if attn_bias is not None and dropout_p == 0.0:
            masked = biased.masked(*given, attn_bias, is_causal, scale)
        if masked is not None:
            out = _laid(query)
            lse = biased.attend(EFFICIENT, out, *given, masked, scale)
            if lse is not None:
                lse = _padded(lse) if compute_log_sumexp else lse.new_empty((*lse.shape[:2], 0))
                seed, offset = (
                    query.new_empty(EFFICIENT.seed, dtype=EFFICIENT.integer) for _ in range(2)
                )
                return out, lse, seed, offset
        flags = (compute_log_sumexp, dropout_p, is_causal)
        by_torch: tuple[torch.Tensor, ...] = self.run_torch(
            NAME, *given, attn_bias, *flags, scale=scale
        )
        return by_torch

    def backward(
        self,
        grad_out: Optional,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: Optional,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        philox_seed: Optional,
        philox_offset: Optional,
        dropout_p: float,
        grad_input_mask: list[bool],
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> Wanted:
        """The gradients of query, key, value and, where it is asked for, the mask."""
        if attn_bias is not None and dropout_p == 0.0 and grad_out is not None:
            found = _gradients(
                grad_out,
                (query, key, value),
                attn_bias,
                (out, logsumexp),
                is_causal,
                scale,
                of_bias=grad_input_mask[3],
            )
            if found is not None:
                return found
        by_torch: Wanted = self.run_torch(
            f"{NAME}_backward",
            grad_out,
            query,
            key,
            value,
            attn_bias,
            out,
            logsumexp,
            philox_seed,
            philox_offset,
            dropout_p,
            grad_input_mask,
            is_causal,
            scale=scale,
        )
        return by_torch


def _gradients(
    grad_out: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    attn_bias: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor],
    is_causal: bool,
    scale: float | None,
    *,
    of_bias: bool,
) -> Wanted | None:
    """Those gradients, or None where torch's kernel is to run."""
    query, key, value = operands
    masked = biased.masked(*operands, attn_bias, is_causal, scale)
    if masked is None:
        return None
    out, lse = results
    ds = None
    if of_bias:
        if attn_bias.shape != (*query.shape[:3], key.shape[2]) or attn_bias.dtype == torch.bool:
            return None
        ds = biased.room_of_ds(query, key)
    into = _laid(query), _laid(key), _laid(value)
    rows = lse[..., : query.shape[2]]
    given = (grad_out, *operands, masked, out, rows, scale)
    if not biased.differentiate(EFFICIENT, into, *given, ds=ds):
        return None
    if ds is not None and ds.dtype != attn_bias.dtype:
        whole = ds.new_empty((*ds.shape[:3], ds.stride(2)), dtype=attn_bias.dtype)
        ds = whole[..., : ds.shape[3]].copy_(ds)
    return *into, ds


def _laid(like: torch.Tensor) -> torch.Tensor:
    """A new tensor [batch, heads, rows, dim] in memory as [batch, rows, heads, dim]."""
    batch, heads, rows, dim = like.shape
    return like.new_empty((batch, rows, heads, dim)).transpose(1, 2)


def _padded(lse: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp with rows up to a multiple of 32."""
    rows = lse.shape[2]
    if rows % _ROWS == 0:
        return lse
    whole = lse.new_full((*lse.shape[:2], -(-rows // _ROWS) * _ROWS), torch.inf)
    whole[..., :rows] = lse
    return whole
