"""Attentions with a mask tensor as torch's fused operators call them, and their gradients.

Masks come as numbers that are added to scores, expanded to [batch, heads, rows, keys] by strides
of 0, or as they were given. Those expanded along a dimension are read as if they lacked it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from warploom.generator.locks import remember
from warploom.integrations import sdpa_mask
from warploom.integrations import sdpa_rules as rules
from warploom.integrations.sdpa_calls import REFUSED, Gradients, Operator, planned
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_backward import call as backwards
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_forward import plan as forwards
from warploom.runtime.families.attention_forward.call import AttentionCall
from warploom.runtime.plan import known

_BOUND = 4096  # kinds of calls remembered, with all plans
_FITTING = (2, 4)  # dimensions of masks that mean the same to all of torch's kernels
_SCORES = 4
Masked = dict[str, Any]  # a keyword of `warploom.attention`


def masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> Masked | None:
    """The mask of a call as a keyword; None where torch's kernel is to run."""
    if attn_bias.dim() not in _FITTING or query.dim() != _SCORES:
        return None
    refused = (
        rules.of_two_dims(query, value)
        or rules.misfit(query, key, value, enable_gqa=True)
        or sdpa_mask.misfit(attn_bias, query, key, is_causal=is_causal)
    )
    if refused or not _positive(scale):
        return None
    own = attn_bias.detach()
    for at, step in enumerate(own.stride()):
        if step == 0:
            own = own.narrow(at, 0, 1)
    return sdpa_mask.keywords(own)


def attend(
    operator: Operator,
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masked: Masked,
    scale: float | None,
) -> torch.Tensor | None:
    """Write `out` and return the log-sum-exp [batch, heads, rows]; None: torch's kernel is to."""
    call = AttentionCall(query, key, value, scale=scale, out=out, **masked)
    kind = (operator.name, *call.signature())
    plan: Any = known.get(kind)
    if plan is None:
        keep = partial(remember, known, kind, bound=_BOUND)
        plan = planned(keep, (query, key, value), scale, partial(forwards.plan, call))
    if plan is REFUSED:
        return None
    lse: torch.Tensor = plan.run(call)[1]
    return lse


def differentiate(
    operator: Operator,
    into: Gradients,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masked: Masked,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float | None,
    *,
    ds: torch.Tensor | None = None,
) -> bool:
    """Write the gradients of query, key and value `into` what is given; False: torch's is to run.

    `ds`, if given, gets those of all scores, in the type of query.
    """
    forward = Arguments(query, key, value, scale=scale, **masked)
    call = BackwardCall(forward, out, lse, grad_out, into=into, ds=ds)
    kind = (operator.name, *call.signature())
    plan: Any = known.get(kind)
    if plan is None:
        keep = partial(remember, known, kind, bound=_BOUND)
        plan = planned(keep, (query, key, value), scale, partial(backwards.plan, call))
    if plan is REFUSED:
        return False
    plan.run(call)
    return True


def room_of_ds(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Where gradients of scores go, with rows as long as torch's own kernel makes them."""
    columns = key.shape[2]
    return query.new_zeros((*query.shape[:3], -(-columns // 16) * 16))[..., :columns]


def _positive(scale: float | None) -> bool:
    return scale is None or 0 < scale < torch.inf
