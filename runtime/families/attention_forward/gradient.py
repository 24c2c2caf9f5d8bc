"""Attention as autograd sees it: what is saved for the backward pass, and what that computes.

Saved are q, k, v, out and lse (and the offsets of packed sequences), never the probabilities. A
second derivative is refused when it is asked for, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd import forward_ad

from warploom.errors import ProblemError
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_backward.plan import attention_backward
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.tensors import refuse_dual

if TYPE_CHECKING:
    from warploom.runtime.families.attention_forward.plan import AttentionPlan

Wanted = tuple[torch.Tensor | None, ...]


def run(plan: AttentionPlan, call: AttentionCall) -> Pair:
    """Run a planned call, so that autograd can differentiate it where a gradient is wanted.

    Raises ProblemError for an `out` that autograd would have to know of, and for a backward_spec
    that computes something else.
    """
    if not torch.is_grad_enabled():
        return plan.run(call)
    q, k, v, out = call.q, call.k, call.v, call.out
    wanted = q.requires_grad or k.requires_grad or v.requires_grad
    if out is not None and (wanted or out.requires_grad):
        refuse_out()
    if not wanted:
        return plan.run(call)
    if call.backward_spec is not None:
        plan.backward_choice(call.deterministic, call.backward_spec)
    found: Pair = _Attention.apply(q, k, v, call, plan)  # type: ignore[no-untyped-call]
    return found


def refuse_out() -> NoReturn:
    """Raise ProblemError for an `out` beside tensors that require grad."""
    raise ProblemError(
        "out with a tensor that requires grad",
        rule="autograd differentiates results that it has not seen before",
        fix="leave out=None, or call under torch.no_grad()",
    )


def refuse_second_derivative(*_: object) -> NoReturn:
    """Raise ProblemError where the gradients of an attention are differentiated themselves."""
    raise ProblemError(
        "a second derivative of warploom.attention",
        rule="attention is differentiable once",
        fix="leave out create_graph=True, or compute this attention with plain torch operations",
    )


class _Attention(torch.autograd.Function):
    """out and lse of a call, differentiable in q, k and v."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: AttentionCall,
        plan: AttentionPlan,
    ) -> Pair:
        out, lse = plan.run(call)
        ctx.save_for_backward(q, k, v, out, lse, *call.offsets)
        ctx.set_materialize_grads(False)
        # Nothing of this is a tensor, which would escape hooks and keep its graph alive.
        # Lengths that were found equal stay so, even if cu_seqlens comes back as two tensors.
        causal = "bottom_right" if call.causal is True else call.causal
        ctx.before = (causal, call.window, call.softcap, call.scale)
        ctx.after = (call.max_seqlen_q, call.max_seqlen_k, None, None)
        ctx.after += (call.deterministic, call.backward_spec)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> Wanted:
        """Return dq, dk and dv, each where it is wanted: they are computed together."""
        q, k, v, out, lse, *offsets = ctx.saved_tensors
        forward = Arguments(q, k, v, *ctx.before, *(offsets or (None, None)), *ctx.after)
        if torch.is_grad_enabled():  # create_graph=True
            found = _Gradients.apply(q, k, v, out, lse, dout, dlse, forward)  # type: ignore[no-untyped-call]
        else:
            found = gradients(forward, out, lse, dout, dlse)
        needed = ctx.needs_input_grad
        return (
            *(one if need else None for one, need in zip(found, needed, strict=False)),
            None,
            None,
        )


class _Gradients(torch.autograd.Function):
    """The backward pass where it might be differentiated: which it cannot be."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        forward: Arguments,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return gradients(forward, out, lse, dout, dlse)

    @staticmethod
    def backward(ctx: object, *_: object) -> NoReturn:
        """Refuse."""
        refuse_second_derivative()


def gradients(
    forward: Arguments,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of a call, in `into` if given; None stands for a gradient of zeros."""
    if forward_ad._current_level >= 0:
        refuse_dual("the gradient of warploom.attention", (dout, dlse))
    if dout is None:
        dout = torch.zeros_like(out)
    return attention_backward(BackwardCall(forward, out, lse, dout, dlse, into))
