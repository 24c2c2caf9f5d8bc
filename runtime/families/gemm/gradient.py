"""GEMM as autograd sees it: what is kept for the backward pass, and what that computes.

Kept are the operands that a wanted gradient is a product of, scales, and what the activation needs;
see gradient_rule.py. A second derivative is refused when it is asked for, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.autograd import forward_ad

from warploom.errors import ProblemError
from warploom.generator.epilogue import MOST_CHARACTERS
from warploom.runtime.families.gemm import (
    gradient_epilogue,
    gradient_products,
)
from warploom.runtime.families.gemm import plan as plans
from warploom.runtime.families.gemm.call import GemmCall, requiring_grad
from warploom.runtime.families.gemm.gradient_epilogue import Passing
from warploom.runtime.families.gemm.gradient_plans import Ways, simple
from warploom.runtime.families.gemm.gradient_products import Gradient
from warploom.runtime.families.gemm.gradient_rule import (
    FLOATS,
    A,
    B,
    GradientOptions,
    Rule,
    kept_type,
    numbers_of,
    reads_of,
    rule,
    storing_items,
    way_of,
)
from warploom.runtime.families.gemm.plan import GemmPlan
from warploom.runtime.operands import dense_copy
from warploom.runtime.plan import planned
from warploom.runtime.tensors import refuse_dual

_CHARACTERS = 48  # of what is put into an epilogue for gradients, in the name of its kernel

Tensors = Sequence[torch.Tensor | None]
Found = tuple[Rule, Ways | None]
TensorsT = TypeVar("TensorsT", bound=Tensors)


def gemm(call: GemmCall) -> torch.Tensor:
    """Run the planned call, planning it first when it is new, for autograd to differentiate."""
    return run(planned(call, GemmPlan), call)


def run(plan: GemmPlan, call: GemmCall) -> torch.Tensor:
    """Run a planned call, so that autograd can differentiate it where a gradient is wanted.

    Raises ProblemError for what autograd would have to know of: `out`, and outputs of steps that
    require grad.
    """
    if not torch.is_grad_enabled():
        return plan.run(call)
    a, b, listed = call.a, call.b, call.listed
    if requiring_grad(a, b, call.out, listed) is None:
        return plan.run(call)
    if call.out is not None:
        call.refuse()
    if not listed:
        return _apply(call, plan, a, b)
    if plan.reads is None:
        plan.reads = tuple(reads_of(listed))
    if len(plan.reads) < len(listed):  # some items have no tensor, or an output
        call.refuse()
    return _apply(call, plan, a, b, *[listed[index][1] for index in plan.reads])


def refuse_second_derivative(*_: object) -> NoReturn:
    """Raise ProblemError where the gradients of a gemm are differentiated themselves."""
    raise ProblemError(
        "a second derivative of warploom.gemm",
        rule="gemm is differentiable once",
        fix="leave out create_graph=True, or compute this product with plain torch operations",
    )


class _Gemm(torch.autograd.Function):
    """D of a call, differentiable in what it reads."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        call: GemmCall,
        plan: GemmPlan,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        needed = ctx.needs_input_grad  # in call and plan too, which need none
        options = call.gradient_options
        kind = (call.preactivation, needed, options.accumulate_into is None)
        how, ways = plan.rules.get(kind) or _rule(call, plan, tensors, kind)
        kept = [tensors[place] for place in how.kept]
        if how.way == "save":
            d, z = _saving(call, plan)
            kept.append(z)
        else:
            d = plan.run(call)
            if how.way == "output":
                kept.append(d)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        # Nothing of this is a tensor with a graph, which would escape hooks and be kept alive.
        if ways is not None:
            ctx.run = ways.run
        else:
            numbers = numbers_of(call.listed) if how.numbered else ()
            ctx.run = partial(gradients, how, numbers, options)
        return d

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dd: torch.Tensor | None,
    ) -> Tensors:
        """Return the gradients that are wanted."""
        found: Tensors = (None,) * len(ctx.needs_input_grad[2:])
        if dd is not None:
            found = once(ctx.run, dd, *ctx.saved_tensors)
        return None, None, *found


# Function.apply itself only adds what torch.func asks for, whose tensors no plan takes.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Gemm).apply


def _rule(
    call: GemmCall, plan: GemmPlan, tensors: Sequence[torch.Tensor], kind: tuple[Any, ...]
) -> Found:
    """How the calls of a kind are differentiated. A kernel that was named stores nothing more."""
    needed = kind[1][2:]
    asked = call.preactivation if call.spec is None else "recompute"
    stored = plan.details.out_dtype in FLOATS
    way = way_of(call.listed, needed, preactivation=asked, stored=stored)
    written = sum(len(step.token) + 1 for step in plan.details.epilogue.steps)
    if way in ("save", "recompute") and written + _CHARACTERS > MOST_CHARACTERS:
        way = "composite"
    how, options = rule(tensors, call.listed, needed, way), call.gradient_options
    ways = None
    plain = options.accumulation == "fast" and options.accumulate_into is None
    if plain and plan.details.out_dtype == call.b.dtype and simple(tensors, call.listed, how):
        ways = Ways(how, partial(gradients, how, (), options), of_weight=False)
    plan.rules[kind] = how, ways
    return how, ways


def _saving(call: GemmCall, plan: GemmPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """D, and what its activation was given, by a plan of its own that is found once."""
    details, listed = plan.details, call.listed
    z = call.a.new_empty(details.out_shape, dtype=kept_type(details.out_dtype, call.a.dtype))
    storing = GemmCall(
        call.a, call.b, storing_items(listed, z), None, call.out_dtype, call.accumulation
    )
    if plan.saving is None:
        plan.saving = plans.plan(storing)
    return plan.saving.run(storing), z


def once(compute: Callable[..., TensorsT], *given: torch.Tensor) -> TensorsT:
    """What `compute` returns of tensors; autograd cannot differentiate it."""
    if not torch.is_grad_enabled():
        return compute(*given)
    found: TensorsT = _Once.apply(compute, *given)  # type: ignore[no-untyped-call]
    return found  # with create_graph=True


class _Once(torch.autograd.Function):
    """A backward pass where it might be differentiated: which it cannot be."""

    @staticmethod
    def forward(ctx: object, compute: Callable[..., Tensors], *given: torch.Tensor) -> Tensors:
        return compute(*given)

    @staticmethod
    def backward(ctx: object, *_: object) -> NoReturn:
        """Refuse."""
        refuse_second_derivative()


def gradients(
    how: Rule,
    numbers: tuple[float, ...],
    options: GradientOptions,
    dd: torch.Tensor,
    *kept: torch.Tensor,
) -> Tensors:
    """The gradients that a rule asks for, by place, from that of D and what was kept."""
    if forward_ad._current_level >= 0:
        refuse_dual("the gradient of warploom.gemm", (dd,))
    if dd.stride(-1) != 1 or dd.stride(-2) == 0:  # as that of a sum, expanded
        dd = dense_copy(dd)
    if dd.dtype.itemsize == 1:
        dd = dd.to(torch.bfloat16)
    tensors: list[torch.Tensor | None] = [None] * len(how.needed)
    for place, one in zip(how.kept, kept, strict=False):
        tensors[place] = one
    z = kept[-1] if how.way in ("save", "output") else None
    accumulation, dtype, into = options
    if how.way == "composite":
        dz, found = gradient_epilogue.composite(how, tensors, numbers, dd, accumulation)
        x = None if dz is None else Passing(dz)
    else:
        x, found = gradient_epilogue.passed(how, tensors, numbers, z, dd, accumulation)
    results: list[torch.Tensor | None] = [found.get(place) for place in range(len(how.needed))]
    if x is None:
        return tuple(results)
    gradient = Gradient(x.of, x.scales, accumulation, dtype)
    a, b = tensors[A], tensors[B]
    if how.needed[A] and b is not None:
        results[A] = gradient_products.of_a(gradient, how.metadata[A], b)
    if how.needed[B] and a is not None:
        results[B] = gradient_products.of_b(gradient, a, how.metadata[B], into)
    return tuple(results)
