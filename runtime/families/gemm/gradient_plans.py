"""Gradients by plans that are kept: those of most products, with the least done on the host.

They are of products of one matrix B of 16 bits, one bias or none, and an activation or none. What
computes those of a kind of backward pass is kept beside the rule: plans of both products, and of
the pass over the gradient that an activation or a bias asks for. They are launched on addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warploom.runtime.families._product.call import Checked
from warploom.runtime.families._product.operands import matrix
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.gradient_rule import A, B, Rule
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import dense_copy, without_memory
from warploom.runtime.plan import Plan, planned
from warploom.runtime.tensors import UnlikeError, launchable

Gradients = Sequence[torch.Tensor | None]
"""Those of A, B and a bias, where they are wanted."""

_ITEMS: tuple[list[str], ...] = ([], ["bias"], ["activation"], ["bias", "activation"])
_BIAS = B + 1


class Ways:
    """What computes the gradients of each kind of backward pass of a rule.

    rule       of a product that is `simple`
    of_weight  a torch weight [n, k] is in the place of B, its transpose, and so is its gradient
    other      what computes them otherwise
    Each way is given dd, the gradient of the result, and what the rule keeps.
    """

    __slots__ = ("_kinds", "_of_weight", "_other", "_rule")

    def __init__(self, rule: Rule, other: Callable[..., Gradients], *, of_weight: bool) -> None:
        self._rule, self._other, self._of_weight = rule, other, of_weight
        self._kinds: Kinds[Callable[..., Gradients]] = Kinds()

    def run(self, dd: torch.Tensor, *kept: torch.Tensor) -> Gradients:
        """The gradients that are wanted; autograd does not see how they are computed."""
        found = self._kinds.find((), dd, *kept)
        try:
            return (found or self._new(dd, *kept))(dd, *kept)
        except UnlikeError:  # their addresses, which are new
            return self._other(dd, *kept)

    def _new(self, dd: torch.Tensor, *kept: torch.Tensor) -> Callable[..., Gradients]:
        if not launchable(dd, *kept):
            return self._other
        run: Callable[..., Gradients]
        if dd.stride(-1) != 1 or dd.stride(-2) == 0 or matrix(dd).data_ptr() != dd.data_ptr():
            run = self._of_a_copy  # as the gradient of a sum, expanded
        else:
            made = _plans(self._rule, dd, *kept, of_weight=self._of_weight)
            run = self._other if made is None else made.run
        self._kinds.keep(run, (), dd, *kept)
        return run

    def _of_a_copy(self, dd: torch.Tensor, *kept: torch.Tensor) -> Gradients:
        return self.run(dense_copy(dd), *kept)


def simple(tensors: Sequence[torch.Tensor], listed: Sequence[Item], rule: Rule) -> bool:
    """Whether plans compute the gradients of such a call, of what it reads by place."""
    a, b = tensors[A], tensors[B]
    return (
        rule.way in ("linear", "output", "save")
        and [item[0] for item in listed] in _ITEMS
        and b.dim() == 2
        and a.dtype == b.dtype
        and b.dtype.itemsize == 2
        and all(bias.shape == b.shape[-1:] for bias in tensors[_BIAS:])
    )


# ---- By plans ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Product:
    """One product of dz with an operand that lies as the planned one did.

    left     the operand is A, not B
    like     a tensor without memory, of the result's shape and type
    turned   the transpose of that is the gradient
    """

    plan: Plan[Checked, torch.Tensor]
    call_of: Callable[[torch.Tensor, torch.Tensor], GemmCall]
    left: bool
    like: torch.Tensor
    turned: bool

    def run(self, dz: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
        d = torch.empty_like(self.like)
        read = (operand, dz) if self.left else (dz, operand)
        addresses = (read[0].data_ptr(), read[1].data_ptr(), d.data_ptr())
        self.plan.run_at((addresses, ()), d, self.call_of, *read)
        return d.t() if self.turned else d


@dataclass(frozen=True, slots=True, repr=False, eq=False)
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
        self.plan.run_at((addresses, ()), (dz, sums), ActivationBackwardCall, dd, z, *self.asked)
        if sums is not None and self.bias_dtype != torch.float32:
            sums = sums.to(self.bias_dtype)
        return dd if dz is None else dz, sums


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Plans:
    """What computes the gradients of a kind of backward pass, of those that are wanted."""

    slope: _Slope | None
    of_a: _Product | None
    of_b: _Product | None
    activated: bool

    def run(self, dd: torch.Tensor, *kept: torch.Tensor) -> Gradients:
        sums = da = db = None
        if self.slope is not None:
            dd, sums = self.slope.run(dd, kept[-1] if self.activated else None)
        if self.of_a is not None:
            da = self.of_a.run(dd, kept[0 if self.of_b is None else 1])
        if self.of_b is not None:
            db = self.of_b.run(dd, kept[0])
        return da, db, sums


def _plans(how: Rule, dd: torch.Tensor, *kept: torch.Tensor, of_weight: bool) -> _Plans | None:
    """The plans for tensors that lie as these do; None where some would be copied."""
    if how.needed[A] and how.metadata[A].column_major:
        return None
    left, activated = list(kept), how.way != "linear"
    biased = how.needed[_BIAS:] == (True,)
    slope = of_a = of_b = None
    if activated or biased:
        z = left.pop() if activated else None
        slope = _slope(how, dd, z, how.metadata[_BIAS].dtype if biased else None)
        dd = dd if z is None else dd.new_empty(dd.shape)
    if how.needed[A]:
        of_a = _product(GemmCall if of_weight else _by_b, dd, left.pop())
    if how.needed[B] and (of_weight or how.metadata[B].column_major):  # of [1, k], any layout fits
        of_b = _product(_of_weight, dd, left.pop(), turned=not of_weight)
    elif how.needed[B]:
        of_b = _product(_of_b, dd, left.pop(), left=True)
    made = [one.plan for one in (slope, of_a, of_b) if one is not None]
    if any(plan.copies for plan in made):
        return None
    return _Plans(slope, of_a, of_b, activated)


def _slope(
    how: Rule, dd: torch.Tensor, z: torch.Tensor | None, bias_dtype: torch.dtype | None
) -> _Slope:
    dtype = how.metadata[B].dtype
    past = (None, None) if z is None else (how.items[-1][1], dtype)
    asked = (past[0], bias_dtype is not None, None, past[1])
    call = ActivationBackwardCall(dd, z, *asked)
    plan: Plan[Any, Any] = planned(call, Plan)
    dz, sums = (
        None if one is None else without_memory(one.shape, one.dtype, one.device)
        for one in call.results(plan.details)
    )
    return _Slope(plan, asked, dz, sums, bias_dtype)


def _product(
    call_of: Callable[[torch.Tensor, torch.Tensor], GemmCall],
    dz: torch.Tensor,
    operand: torch.Tensor,
    *,
    left: bool = False,
    turned: bool = False,
) -> _Product:
    call = call_of(operand, dz) if left else call_of(dz, operand)
    plan = planned(call)
    details = plan.details
    like = without_memory(details.out_shape, details.out_dtype, dz.device)
    return _Product(plan, call_of, left, like, turned)


def _by_b(dz: torch.Tensor, b: torch.Tensor) -> GemmCall:
    """The gradient of A."""
    return GemmCall(dz, b.t())


def _of_weight(dz: torch.Tensor, a: torch.Tensor) -> GemmCall:
    """The gradient of a weight [n, k], whose transpose is B."""
    return GemmCall(matrix(dz).t(), matrix(a))


def _of_b(a: torch.Tensor, dz: torch.Tensor) -> GemmCall:
    """The gradient of a B whose rows are contiguous."""
    return GemmCall(matrix(a).t(), matrix(dz))
