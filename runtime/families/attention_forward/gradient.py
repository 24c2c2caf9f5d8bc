"""Attention as autograd sees it: what is saved for the backward pass, and what that computes.

Saved are q, k, v, out and lse (with the offsets of packed sequences and what else results depend
on), never the probabilities, or which are dropped. A
second derivative is refused when it is asked for, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from warploom.errors import ProblemError
from warploom.runtime.dispatch import named
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
    further = call.further
    wanted = q.requires_grad or k.requires_grad or v.requires_grad
    wanted = wanted or any(one.requires_grad for one in further.values())
    if out is not None and (wanted or out.requires_grad):
        refuse_out()
    if not wanted:
        if call.backward_spec is not None:
            named(call.backward_spec)  # or it is refused
        return plan.run(call)
    if call.backward_spec is not None:
        plan.backward_choice(call.deterministic, call.backward_spec)
    given = (q, k, v, *call.offsets, *further.values())
    numbers = (call.scale, call.softcap, call.dropout_p)
    return apply(lambda *_: plan.run(call), Asked.of(call), numbers, *given)


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
    """out and lse of a call, differentiable in q, k, v and sinks."""

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
        """Return the gradients, each where it is wanted: dq, dk and dv are computed together."""
        run = _gradients if torch.is_grad_enabled() else differentiate  # create_graph=True
        asked: Asked = ctx.asked
        _, _, _, *needed = ctx.needs_input_grad
        if asked.further:
            names = zip(asked.further, needed[-len(asked.further) :], strict=True)
            asked = asked._replace(wanted=tuple(name for name, need in names if need))
        found = run(asked, ctx.numbers, dout, dlse, *ctx.saved_tensors)
        first = [one if need else None for one, need in zip(found[:3], needed, strict=False)]
        last = dict(zip(asked.wanted, found[3:], strict=True))
        offsets = len(needed) - 3 - len(asked.further)
        return None, None, None, *first, *[None] * offsets, *map(last.get, asked.further)


# Function.apply itself only adds what torch.func asks for, whose tensors no plan takes.
apply: Callable[..., Pair] = super(torch.autograd.Function, _Attention).apply
"""out and lse as `launch` returns them, of what follows it in `_Attention.forward`."""


class _Gradients(torch.autograd.Function):
    """The backward pass where it might be differentiated: which it cannot be."""

    @staticmethod
    def forward(ctx: object, *given: Any) -> tuple[torch.Tensor, ...]:
        return differentiate(*given)

    @staticmethod
    def backward(ctx: object, *_: object) -> NoReturn:
        """Refuse."""
        refuse_second_derivative()


_gradients: Callable[..., tuple[torch.Tensor, ...]] = _Gradients.apply
