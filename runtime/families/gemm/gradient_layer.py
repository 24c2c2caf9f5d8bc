"""The gradients of a layer's calls (layer.py), with the least that is done on the host.

What computes those of a kind of backward pass is kept on the rule: plans of both products, and of
the pass over the gradient that an activation or a bias asks for. They are launched on addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.families.gemm import gradient
from warploom.runtime.families.gemm import plan as plans
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.gradient_rule import (
    A,
    B,
    GradientOptions,
    Preactivation,
    Rule,
    rule,
    way_of,
)
from warploom.runtime.families.gemm.operands import matrix
from warploom.runtime.families.gemm.plan import GemmPlan
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import without_memory
from warploom.runtime.plan import Plan, known, make
from warploom.runtime.tensors import UnlikeError, launchable

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Those of x, weight and bias, where they are wanted."""

_OPTIONS = GradientOptions("fast", torch.bfloat16, None)
_BIAS = B + 1


@dataclass(slots=True)
class LayerRule:
    """How calls of one kind are differentiated.

    rule    that of the product with b, the transpose of the weight
    kinds   what computes the gradients of a kind of backward pass, of dd and what was saved
    """

    rule: Rule
    kinds: Kinds[Callable[..., Gradients]] = field(default_factory=Kinds)

    def saved(
        self, x: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor
    ) -> list[torch.Tensor]:
        """What is saved, in order: `slope` is what the activation was given, or its result."""
        needed = self.rule.needed
        saved = [weight] if needed[A] else []
        if needed[B]:
            saved.append(x)
        if self.rule.way != "linear":
            saved.append(slope)
        return saved


def rule_of(
    call: GemmCall, read: Sequence[torch.Tensor], preactivation: Preactivation
) -> LayerRule | None:
    """How a call of b, the transpose of a weight, is differentiated in what it reads.

    None where that is not for plans alone.
    """
    needed, n = tuple(one.requires_grad for one in read), call.b.shape[-1:]
    way = way_of(call.listed, needed, preactivation=preactivation, stored=True)
    if way not in ("linear", "output", "save") or any(bias.shape != n for bias in read[_BIAS:]):
        return None
    return LayerRule(rule((call.a, call.b, *read[_BIAS:]), call.listed, needed, way))


def differentiate(how: LayerRule, dd: torch.Tensor, *saved: torch.Tensor) -> Gradients:
    """The gradients of a call, whose result's is dd; they are not differentiable."""
    if torch.is_grad_enabled():  # with create_graph=True
        return gradient.once(partial(_by_rule, how.rule), dd, *saved)
    run = how.kinds.find((), dd, *saved)
    try:
        if run is None:
            run = _planned(how, dd, *saved)
        return run(dd, *saved)
    except UnlikeError:  # their addresses, which are new
        return _by_rule(how.rule, dd, *saved)


def _planned(how: LayerRule, dd: torch.Tensor, *saved: torch.Tensor) -> Callable[..., Gradients]:
    """What computes the gradients of passes like this one."""
    by_rule = partial(_by_rule, how.rule)
    if not launchable(dd, *saved):
        return by_rule
    run: Callable[..., Gradients]
    if dd.stride(-1) != 1 or matrix(dd).data_ptr() != dd.data_ptr() or dd.stride(-2) == 0:
        run = partial(_contiguous, how)
    else:
        found = _plans(how.rule, dd, *saved)
        run = by_rule if found is None else found.run
    how.kinds.keep(run, (), dd, *saved)
    return run


def _contiguous(how: LayerRule, dd: torch.Tensor, *saved: torch.Tensor) -> Gradients:
    """The same, of a gradient that kernels cannot read, as that of a sum, expanded."""
    return differentiate(how, dd.contiguous(), *saved)


def _by_rule(how: Rule, dd: torch.Tensor, *saved: torch.Tensor) -> Gradients:
    """The same, as the gradients of any product."""
    left = list(saved)
    weight = left.pop(0) if how.needed[A] else None
    kept = [left.pop(0)] if how.needed[B] else []
    if weight is not None:
        kept.append(weight.t())
    found = list(gradient.gradients(how, (), _OPTIONS, dd, *kept, *left))
    of_b = found[B]
    return found[A], None if of_b is None else of_b.t(), found[_BIAS] if found[_BIAS:] else None


# ---- By plans ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Product:
    """One product, of operands that lie as the planned ones did; its result is `like` a tensor."""

    plan: GemmPlan
    call_of: Callable[[torch.Tensor, torch.Tensor], GemmCall]
    like: torch.Tensor

    def run(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        d = torch.empty_like(self.like)
        addresses = (left.data_ptr(), right.data_ptr(), d.data_ptr())
        self.plan.run_at(addresses, d, self.call_of, left, right)
        return d


@dataclass(frozen=True, slots=True)
class _Slope:
    """The way past an activation, and the sums of columns for a bias: by the arguments `asked`.

    Results are like `dz` and `sums`, where there are these.
    """

    plan: Plan[Any, Any]
    asked: tuple[Any, ...]
    dz: torch.Tensor | None
    sums: torch.Tensor | None
    bias_dtype: torch.dtype | None

    def run(
        self, dd: torch.Tensor, z: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        addresses: tuple[int, ...] = (dd.data_ptr(),)
        dz = sums = None
        if z is not None and self.dz is not None:
            dz = torch.empty_like(self.dz)
            addresses = (*addresses, z.data_ptr(), dz.data_ptr())
        if self.sums is not None:
            sums = torch.empty_like(self.sums)
            addresses = (*addresses, sums.data_ptr())
        self.plan.run_at(addresses, (dz, sums), ActivationBackwardCall, dd, z, *self.asked)
        if sums is not None and self.bias_dtype != torch.float32:
            sums = sums.to(self.bias_dtype)
        return dd if dz is None else dz, sums


@dataclass(frozen=True, slots=True)
class _Plans:
    """What computes the gradients of a kind of backward pass, of those that are wanted."""

    slope: _Slope | None
    of_x: _Product | None
    of_weight: _Product | None
    activated: bool

    def run(self, dd: torch.Tensor, *saved: torch.Tensor) -> Gradients:
        sums = dx = dweight = None
        if self.slope is not None:
            dd, sums = self.slope.run(dd, saved[-1] if self.activated else None)
        if self.of_x is not None:
            dx = self.of_x.run(dd, saved[0])
        if self.of_weight is not None:
            dweight = self.of_weight.run(dd, saved[0 if dx is None else 1])
        return dx, dweight, sums


def _plans(how: Rule, dd: torch.Tensor, *saved: torch.Tensor) -> _Plans | None:
    """The plans for tensors that lie as these do; None where some would be copied."""
    left, activated = list(saved), how.way != "linear"
    wanted = how.metadata[_BIAS].dtype if how.needed[_BIAS:] == (True,) else None
    slope = of_x = of_weight = None
    if activated or wanted is not None:
        function = how.items[-1][1] if activated else None
        z = left.pop() if activated else None
        slope = _slope(dd, z, function, how.metadata[B].dtype, wanted)
        dd = dd if z is None else dd.new_empty(dd.shape)
    if how.needed[A]:
        of_x = _product(GemmCall, dd, left.pop(0))
    if how.needed[B]:
        of_weight = _product(_of_weight, dd, left.pop(0))
    made = [one.plan for one in (slope, of_x, of_weight) if one is not None]
    if any(plan.copies for plan in made):
        return None
    return _Plans(slope, of_x, of_weight, activated)


def _slope(
    dd: torch.Tensor,
    z: torch.Tensor | None,
    function: str | None,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> _Slope:
    asked = (function, bias_dtype is not None, None, dtype if function else None)
    call = ActivationBackwardCall(dd, z, *asked)
    plan: Plan[Any, Any] = known.get(call.signature()) or make(call, Plan)
    dz, sums = (
        None if one is None else without_memory(one.shape, one.dtype, one.device)
        for one in call.results(plan.details)
    )
    return _Slope(plan, asked, dz, sums, bias_dtype)


def _product(
    call_of: Callable[[torch.Tensor, torch.Tensor], GemmCall],
    left: torch.Tensor,
    right: torch.Tensor,
) -> _Product:
    call = call_of(left, right)
    plan: GemmPlan = known.get(call.signature()) or plans.plan(call)
    details = plan.details
    like = without_memory(details.out_shape, details.out_dtype, left.device)
    return _Product(plan, call_of, like)


def _of_weight(dz: torch.Tensor, x: torch.Tensor) -> GemmCall:
    return GemmCall(matrix(dz).t(), matrix(x))
