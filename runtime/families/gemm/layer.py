"""activation(x W^T + bias), as a torch layer calls it: with the least that is done on the host.

A layer keeps, for each kind of its calls, the plan, how it is differentiated, and the plans of its
gradients (gradient_plans.py): a call like an earlier one makes no view, no key and no rule, and
autograd sees the weight itself. What does not lie row by row, or would be copied for a kernel, goes
the way of `gemm`, as does what compilers and modes are to see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from warploom.runtime.families._product.epilogue import items as epilogue_items
from warploom.runtime.families.gemm.api import GemmPlan, gemm
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.gradient import gradients, once
from warploom.runtime.families.gemm.gradient_plans import Ways, simple
from warploom.runtime.families.gemm.gradient_rule import (
    B,
    GradientOptions,
    Preactivation,
    Rule,
    rule,
    storing_items,
    way_of,
)
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import without_memory
from warploom.runtime.plan import planned
from warploom.runtime.tensors import UnlikeError, WithoutMemoryError, launchable

_OPTIONS = GradientOptions("fast", torch.bfloat16, None)


class Layer:
    """The calls of one layer, and what is kept of their kinds; a copy keeps nothing."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: Kinds[Callable[..., torch.Tensor]] = Kinds()

    def again(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        preactivation: Preactivation,
    ) -> torch.Tensor | None:
        """What `call` returns, if it was called alike; None where that is to be called.

        Not for compilers to trace.
        """
        read = (x, weight) if bias is None else (x, weight, bias)
        run = self._kinds.find((activation, preactivation, len(read)), *read)
        if run is None:
            return None
        try:
            return run(x, weight, bias)
        except UnlikeError:  # their addresses, which are new
            return None

    def call(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        preactivation: Preactivation,
    ) -> torch.Tensor:
        """Return `gemm` of x [.., m, k] and the transpose of a weight [n, k], with this epilogue.

        What is found out is kept for calls alike. Raises ProblemError as `gemm` does.
        """
        by_gemm = partial(_by_gemm, activation, preactivation)
        read = (x, weight) if bias is None else (x, weight, bias)
        if launchable(*read) and not torch._C._is_any_autocast_enabled():
            with contextlib.suppress(UnlikeError, WithoutMemoryError):  # gemm has another way
                kind = _kind(x, weight, bias, activation, preactivation)
                run = by_gemm if kind is None else kind.run
                self._kinds.keep(run, (activation, preactivation, len(read)), *read)
                return run(x, weight, bias)
        return by_gemm(x, weight, bias)


def _by_gemm(
    activation: str | None,
    preactivation: Preactivation,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return gemm(x, weight.t(), bias=bias, activation=activation, preactivation=preactivation)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Kind:
    """What is known of a kind of call.

    like    a tensor without memory, of the result's shape and type
    rule    how it is differentiated, and `ways`, by what; None: it is not
    """

    plan: GemmPlan
    activation: str | None
    like: torch.Tensor
    rule: Rule | None
    ways: Ways | None

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.rule is None:
            return self.launch(x, weight, bias, None)
        return _apply(self, x, weight, bias)

    def launch(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        z: torch.Tensor | None,
    ) -> torch.Tensor:
        """The result; what the activation is given goes to z."""
        d = torch.empty_like(self.like)
        addresses: tuple[int, ...] = (x.data_ptr(), weight.data_ptr(), d.data_ptr())
        if bias is not None:
            addresses = (*addresses, bias.data_ptr())
        if z is not None:
            addresses = (*addresses, z.data_ptr())
        self.plan.run_at((addresses, ()), d, _call, x, weight, bias, self.activation, z)
        return d


def _kind(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    preactivation: Preactivation,
) -> _Kind | None:
    """What is to be known of calls like this one; None where they are for `gemm`."""
    if x.stride(-1) != 1 or weight.stride(-1) != 1:  # gradients lie as operands do
        return None
    read = (x, weight) if bias is None else (x, weight, bias)
    call, how, ways = _call(x, weight, bias, activation, None), None, None
    if torch.is_grad_enabled() and any(one.requires_grad for one in read):
        needed = tuple(one.requires_grad for one in read)
        tensors = (x, call.b, *read[2:])
        way = way_of(call.listed, needed, preactivation=preactivation, stored=True)
        how = rule(tensors, call.listed, needed, way)
        if not simple(tensors, call.listed, how):
            return None
        ways = Ways(how, partial(_by_rule, how), of_weight=True)
        if way == "save":
            z = x.new_empty((*x.shape[:-1], len(weight)))
            call = _call(x, weight, bias, activation, z)
    plan = planned(call, GemmPlan)
    if plan.copies:
        return None
    details = plan.details
    like = without_memory(details.out_shape, details.out_dtype, x.device)
    return _Kind(plan, activation, like, how, ways)


def _call(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    z: torch.Tensor | None,
) -> GemmCall:
    listed = epilogue_items(bias=bias, activation=activation)
    return GemmCall(x, weight.detach().t(), listed if z is None else storing_items(listed, z))


class _Layer(torch.autograd.Function):
    """The result of a call, differentiable in x, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        kind: _Kind,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        how = cast("Rule", kind.rule)
        z = torch.empty_like(kind.like) if how.way == "save" else None
        d = kind.launch(x, weight, bias, z)
        tensors = (x, weight)
        kept = [tensors[place] for place in how.kept]
        if how.way != "linear":
            kept.append(d if z is None else z)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.ways = kind.ways  # which has no tensor with a graph: it would escape hooks
        return d

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dd: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients that are wanted."""
        if dd is None:
            return None, None, None, None
        return None, *once(ctx.ways.run, dd, *ctx.saved_tensors)


# Function.apply itself only adds what torch.func asks for, whose tensors no plan takes.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Layer).apply


def _by_rule(how: Rule, dd: torch.Tensor, *kept: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """The gradients as those of any product, for which the weight is turned, and turned back."""
    given = [one.t() if place == B else one for place, one in zip(how.kept, kept, strict=False)]
    found = list(gradients(how, (), _OPTIONS, dd, *given, *kept[len(given) :]))
    of_b = found[B]
    found[B] = None if of_b is None else of_b.t()
    return found if found[2:] else [*found, None]
