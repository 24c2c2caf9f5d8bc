"""Attention as autograd sees it: what is saved for the backward pass, and what that computes.

Saved are q, k, v, out and lse (and the offsets of packed sequences), never the probabilities. A
second derivative is refused when it is asked for, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from warploom.errors import ProblemError
from warploom.runtime.families.attention_backward.reference import Gradients
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.families.attention_forward.gradient_plans import (
    Asked,
    Numbers,
    differentiate,
)

if TYPE_CHECKING:
    from warploom.runtime.families.attention_forward.plan import AttentionPlan

Wanted = tuple[torch.Tensor | None, ...]
Launch = Callable[..., Pair]  # of what is asked, numbers, and what is read


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
    given = (q, k, v, *call.offsets)
    return apply(lambda *_: plan.run(call), Asked.of(call), (call.scale, call.softcap), *given)


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
        launch: Launch,
        asked: Asked,
        numbers: Numbers,
        *read: torch.Tensor,
    ) -> Pair:
        out, lse = launch(asked, numbers, *read)
        ctx.save_for_backward(*read[:3], out, lse, *read[3:])
        ctx.set_materialize_grads(False)
        ctx.asked, ctx.numbers = asked, numbers  # no tensor, which would escape hooks
        return out, lse

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> Wanted:
        """Return dq, dk and dv, each where it is wanted: they are computed together."""
        run = _gradients if torch.is_grad_enabled() else differentiate  # create_graph=True
        found = run(ctx.asked, ctx.numbers, dout, dlse, *ctx.saved_tensors)
        _, _, _, *needed = ctx.needs_input_grad
        wanted = [one if need else None for one, need in zip(found, needed, strict=False)]
        return None, None, None, *wanted, *[None] * (len(needed) - 3)


# Function.apply itself only adds what torch.func asks for, whose tensors no plan takes.
apply: Callable[..., Pair] = super(torch.autograd.Function, _Attention).apply
"""out and lse as `launch` returns them, of what follows it in `_Attention.forward`."""


class _Gradients(torch.autograd.Function):
    """The backward pass where it might be differentiated: which it cannot be."""

    @staticmethod
    def forward(ctx: object, *given: Any) -> Gradients:
        return differentiate(*given)

    @staticmethod
    def backward(ctx: object, *_: object) -> NoReturn:
        """Refuse."""
        refuse_second_derivative()


_gradients: Callable[..., Gradients] = _Gradients.apply
