"""Attentions and their gradients as torch's fused operators call them: at little host time.

An operator is called from torch's dispatcher, below autograd, with tensors that are memory. What
is known of a kind of call, its plan or that torch's kernel runs it, torch's guards find. Results
lie as the operators' registrations for fake tensors say: like the operands that they belong to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from warploom.errors import ProblemError
from warploom.integrations import sdpa_rules as rules
from warploom.runtime import plan as plans
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_backward import call as backwards
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_forward import plan as forwards
from warploom.runtime.families.attention_forward.call import AttentionCall
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import without_memory
from warploom.runtime.tensors import UnlikeError

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

REFUSED: Any = object()
_BOUND = 4096  # kinds of calls remembered
_ALIGNED = 15  # bits that are 0 in a multiple of 16 bytes, which TMA reads
_forwards: Kinds[Any] = Kinds(_BOUND)
_backwards: Kinds[Any] = Kinds(_BOUND)


class Operator(NamedTuple):
    """One of torch's fused attentions, and what its results look like beside the output.

    aligned   whom row 0 sees under is_causal where lengths differ
    lse       the dimensions of the log-sum-exp after [batch, heads, query length]
    seed, integer   the shape of the random seed, and the type of the seed and its offset
    """

    name: str
    aligned: Literal["top_left", "bottom_right"]
    lse: tuple[int, ...]
    seed: tuple[int, ...]
    integer: torch.dtype


class Forward(NamedTuple):
    """What is known of a kind of forward call: its plan, and tensors that results are made like."""

    plan: forwards.AttentionPlan
    lse: torch.Tensor
    seed: torch.Tensor
    offset: torch.Tensor
    debug: torch.Tensor


def attend(
    operator: Operator,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, Forward] | None:
    """out, its log-sum-exp and what is known of the call; None where torch's kernel is to run."""
    at = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if (at[0] | at[1] | at[2]) & _ALIGNED:
        return None
    options = (operator.name, is_causal, scale is None or 0 < scale < torch.inf)
    given = (query, key, value, is_causal, scale)
    made = _forwards.find(options, query, key, value)
    if made is None:
        made = planned(
            lambda found: _forwards.keep(found, options, query, key, value),
            (query, key, value),
            scale,
            lambda: _plan_forward(operator, *given),
        )
    if made is REFUSED:
        return None
    plan: forwards.AttentionPlan = made.plan
    out, lse = torch.empty_like(query), torch.empty_like(made.lse)
    if plan.launch is None:  # the reference makes an lse of its own
        _, computed = plan.run(_forward_call(operator, out, *given))
        return out, lse.copy_(computed.view(lse.shape)), made
    addresses = (*at, out.data_ptr(), lse.data_ptr())
    arguments = addresses, (plan.details.scale if scale is None else scale,)
    plan.run_at(arguments, (out, lse), _forward_call, operator, out, *given)
    return out, lse, made


def differentiate(
    operator: Operator,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> Gradients | None:
    """The gradients of query, key and value; None where torch's kernel is to run."""
    read = (query, key, value, out, grad_out, lse)
    at = tuple([one.data_ptr() for one in read])
    if (at[0] | at[1] | at[2]) & _ALIGNED:
        return None
    options = (
        operator.name,
        is_causal,
        scale is None or 0 < scale < torch.inf,
        torch.are_deterministic_algorithms_enabled(),
    )
    into = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    given = (operator, into, grad_out, query, key, value, out, lse, is_causal, scale)
    plan = _backwards.find(options, *read)
    if plan is None:
        plan = planned(
            lambda found: _backwards.keep(found, options, *read),
            (query, key, value),
            scale,
            lambda: plans.planned(_backward_call(*given), backwards.AttentionBackwardPlan),
        )
    if plan is REFUSED:
        return None
    if plan.launch is not None and not plan.copies and lse.is_contiguous():
        addresses = (*at, 0, into[0].data_ptr(), into[1].data_ptr(), into[2].data_ptr())
        arguments = addresses, (plan.details.scale if scale is None else scale,)
        with contextlib.suppress(UnlikeError):  # an address that is new is no multiple of 16 bytes
            plan.run_at(arguments, into, _backward_call, *given)
            return into
    return backwards.attention_backward(_backward_call(*given))


# ---- What is new ---------------------------------------------------------------------------------


def planned(
    keep: Callable[[Any], None],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float | None,
    make: Callable[[], object],
) -> Any:  # noqa: ANN401 (what `make` returns)
    """What `keep` is given of a kind of call that is new: what is made for it, or REFUSED.

    The rules are those of `warploom.sdpa`, of tensors [batch, heads, length, dim]. While a graph is
    captured nothing can be planned: torch's kernel runs, and a later call is new again.
    """
    made: object = REFUSED
    if not _refusal(*tensors, scale):
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return REFUSED
        with contextlib.suppress(ProblemError), torch.inference_mode(mode=False):
            made = make()  # or it is refused: for instance what is too large for a kernel
    keep(made)
    return made


def _refusal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> str | None:
    if query.dim() != 4:
        return "query is not [batch, heads, length, dim]"
    return rules.of_two_dims(query, value) or rules.refusal(
        query, key, value, None, 0.0, is_causal=False, scale=scale, enable_gqa=True
    )


def _plan_forward(operator: Operator, *given: Any) -> Forward:
    query = given[0]
    call = _forward_call(operator, torch.empty_like(query), *given)
    plan = plans.planned(call, forwards.AttentionPlan)
    device, shape = query.device, (*plan.details.lse_shape, *operator.lse)
    return Forward(
        plan,
        without_memory(shape, torch.float32, device),
        without_memory(operator.seed, operator.integer, device),
        without_memory((), operator.integer, device),
        torch.empty(0, dtype=query.dtype, device=device),
    )


# ---- Calls ---------------------------------------------------------------------------------------


def _forward_call(
    operator: Operator,
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> AttentionCall:
    causal = operator.aligned if is_causal else False
    return AttentionCall(query, key, value, causal=causal, scale=scale, out=out)


def _backward_call(
    operator: Operator,
    into: Gradients,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> BackwardCall:
    causal = operator.aligned if is_causal else False
    forward = Arguments(query, key, value, causal=causal, scale=scale)
    return BackwardCall(forward, out, lse.view(out.shape[:-1]), grad_out, into=into)
