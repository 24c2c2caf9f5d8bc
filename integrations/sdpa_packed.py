"""Attentions of packed sequences as torch's operator calls them: varlen_attn, nested tensors.

Tensors are [total, heads, dim]; sequence i has the rows cum_seq[i] to cum_seq[i + 1]. The diagonal
of masks ends at the bottom right of each sequence, as FlashAttention has it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from warploom.generator.locks import remember
from warploom.integrations.sdpa_calls import REFUSED, Gradients, planned
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_backward import call as backwards
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_forward import plan as forwards
from warploom.runtime.families.attention_forward.call import AttentionCall
from warploom.runtime.plan import known

_BOUND = 4096  # kinds of calls remembered, with all plans


class PackedArguments(NamedTuple):
    """Where sequences are, and which columns a row attends to; a bound below 0 or None is none."""

    cum_seq_q: torch.Tensor
    cum_seq_k: torch.Tensor
    max_q: int
    max_k: int
    is_causal: bool
    left: int | None
    right: int | None
    scale: float | None

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> AttentionCall:
        """The attention of these sequences."""
        left = None if self.left is None or self.left < 0 else self.left
        right = None if self.right is None or self.right < 0 else self.right
        return AttentionCall(
            query,
            key,
            value,
            causal="bottom_right" if self.is_causal else False,
            window=None if left is None and right is None else (left, right),
            scale=self.scale,
            cu_seqlens_q=self.cum_seq_q,
            cu_seqlens_k=self.cum_seq_k,
            max_seqlen_q=self.max_q,
            max_seqlen_k=self.max_k,
            out=out,
        )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: PackedArguments
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """out and its log-sum-exp [heads, total]; None where torch's kernel is to run."""
    call = arguments.call(query, key, value, torch.empty_like(query))
    kind = ("packed", _positive(arguments.scale), *call.signature())
    plan: forwards.AttentionPlan | None = known.get(kind)
    if plan is None:
        plan = planned(
            partial(_keep, kind), _as_one(call), arguments.scale, partial(forwards.plan, call)
        )
    return None if plan is REFUSED else plan.run(call)


def differentiate(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    arguments: PackedArguments,
) -> Gradients | None:
    """The gradients of query, key and value; None where torch's kernel is to run."""
    forward = arguments.call(query, key, value)
    into = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    call = BackwardCall(forward, out, lse, grad_out, into=into)
    kind = ("packed gradients", _positive(arguments.scale), *call.signature())
    plan: backwards.AttentionBackwardPlan | None = known.get(kind)
    if plan is None:
        plan = planned(
            partial(_keep, kind), _as_one(forward), arguments.scale, partial(backwards.plan, call)
        )
    return None if plan is REFUSED else plan.run(call)


def _keep(kind: tuple[object, ...], plan: object) -> None:
    remember(known, kind, plan, _BOUND)


def _positive(scale: float | None) -> bool:
    return scale is None or 0 < scale < torch.inf


def _as_one(call: Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of all sequences as one of a batch, [1, heads, total, dim]: what rules are about."""
    q, k, v = (
        tensor.transpose(0, 1)[None] if tensor.dim() == 3 else tensor
        for tensor in (call.q, call.k, call.v)
    )
    return q, k, v
