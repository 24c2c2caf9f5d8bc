"""Attentions and their gradients as torch's fused operators call them: at little host time.

An operator is called from torch's dispatcher, below autograd, with tensors that are memory. What
is known of a kind of call, its plan or that torch's kernel runs it, is one look-up away. Results
lie as the operators' registrations for fake tensors say: like the operands that they belong to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from warploom.errors import ProblemError
from warploom.integrations import sdpa_rules as rules
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_backward import plan as backwards
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_forward import plan as forwards
from warploom.runtime.families.attention_forward.call import AttentionCall
from warploom.runtime.launch_plan import remember
from warploom.runtime.operands import without_memory
from warploom.runtime.plan import known

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Kind = tuple[object, ...]

_BOUND = 4096  # kinds of calls remembered, with all plans
REFUSED: Any = object()


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
    at_q, at_k, at_v = query.data_ptr(), key.data_ptr(), value.data_ptr()
    kind = (
        operator.name,
        is_causal,
        scale is None or 0 < scale < torch.inf,
        query.shape,
        query.stride(),
        query.dtype,
        query.get_device(),
        at_q & 15,
        key.shape,
        key.stride(),
        key.dtype,
        key.get_device(),
        at_k & 15,
        value.shape,
        value.stride(),
        value.dtype,
        value.get_device(),
        at_v & 15,
    )
    given = (query, key, value, is_causal, scale)
    made = known.get(kind)
    if made is None:
        make = partial(_plan_forward, operator, *given)
        made = planned(kind, (query, key, value), scale, make)
    if made is REFUSED:
        return None
    plan: forwards.AttentionPlan = made.plan
    out, lse = torch.empty_like(query), torch.empty_like(made.lse)
    if plan.launch is None:  # the reference makes an lse of its own
        _, computed = plan.run(_forward_call(operator, out, *given))
        return out, lse.copy_(computed.view(lse.shape)), made
    addresses = (at_q, at_k, at_v, out.data_ptr(), lse.data_ptr())
    scalars = (plan.details.scale if scale is None else scale,)
    plan.launch.run(addresses, scalars, _check_forward, plan, lse, operator, out, *given)
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
    kind = (
        operator.name,
        "gradients",
        is_causal,
        scale is None or 0 < scale < torch.inf,
        torch.are_deterministic_algorithms_enabled(),
        lse.is_contiguous(),
        *_layout(grad_out),
        *_layout(query),
        *_layout(key),
        *_layout(value),
        *_layout(out),
    )
    into = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    given = (grad_out, query, key, value, out, lse, is_causal, scale)
    plan = known.get(kind)
    if plan is None:
        call = _backward_call(operator, into, *given)
        plan = planned(kind, (query, key, value), scale, partial(backwards.plan, call))
    if plan is REFUSED:
        return None
    if plan.launch is None or plan.copies or not lse.is_contiguous():
        found: Gradients = plan.run(_backward_call(operator, into, *given))
        return found
    read = (query, key, value, out, grad_out, lse)
    addresses = (*(tensor.data_ptr() for tensor in read), 0, *(to.data_ptr() for to in into))
    scalars = (plan.details.scale if scale is None else scale,)
    plan.launch.run(addresses, scalars, _check_backward, plan, operator, into, *given)
    return into


# ---- What is new ---------------------------------------------------------------------------------


def planned(
    kind: Kind,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float | None,
    make: Callable[[], object],
) -> Any:  # noqa: ANN401 (what `make` returns)
    """What is kept of a kind of call that is new: what is made for it, or REFUSED.

    The rules are those of `warploom.sdpa`, of tensors [batch, heads, length, dim]. While a graph is
    captured nothing can be planned: torch's kernel runs, and a later call is new again.
    """
    made: object = REFUSED
    if not _refusal(*tensors, scale):
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return REFUSED
        with contextlib.suppress(ProblemError), torch.inference_mode(mode=False):
            made = make()  # or it is refused: for instance what is too large for a kernel
    remember(known, kind, made, _BOUND)
    return made


def _refusal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> str | None:
    if query.dim() != 4:
        return "query is not [batch, heads, length, dim]"
    return rules.refusal(
        query, key, value, None, 0.0, is_causal=False, scale=scale, enable_gqa=True
    )


def _plan_forward(operator: Operator, *given: Any) -> Forward:
    query = given[0]
    plan = forwards.plan(_forward_call(operator, torch.empty_like(query), *given))
    device, shape = query.device, (*plan.details.lse_shape, *operator.lse)
    return Forward(
        plan,
        without_memory(shape, torch.float32, device),
        without_memory(operator.seed, operator.integer, device),
        without_memory((), operator.integer, device),
        torch.empty(0, dtype=query.dtype, device=device),
    )


def _layout(tensor: torch.Tensor) -> Kind:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.get_device(),
        tensor.data_ptr() & 15,
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


def _check_forward(plan: forwards.AttentionPlan, lse: torch.Tensor, *given: Any) -> None:
    call = _forward_call(*given)
    call.check(plan.details, (given[1], lse))


def _check_backward(plan: backwards.AttentionBackwardPlan, *given: Any) -> None:
    call = _backward_call(*given)
    call.check(plan.details, given[1])
