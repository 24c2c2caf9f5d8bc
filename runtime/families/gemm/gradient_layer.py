"""The gradients of a layer: what most calls are, with no more done on the host than they need.

The plans of both products are kept on the rule, by how their operands lie, so that a backward pass
that is like an earlier one makes no calls of them, no views and no signatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from warploom.generator.families.gemm import Accumulation
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.gemm import gradient_products
from warploom.runtime.families.gemm import plan as plans
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.gradient_products import product
from warploom.runtime.families.gemm.gradient_rule import A, B, GradientOptions, Rule
from warploom.runtime.families.gemm.operands import matrix
from warploom.runtime.families.gemm.plan import GemmPlan
from warploom.runtime.launch_plan import remember
from warploom.runtime.plan import known
from warploom.runtime.tensors import WithoutMemoryError

_BOUND = 64  # kinds of backward passes remembered of a rule

Results = list[torch.Tensor | None]  # gradients by place
Tensors = Sequence[torch.Tensor | None]


class Plans(NamedTuple):
    """What computes the gradients of A and B, where they are wanted.

    fit    each is one launch on tensors that it reads where they lie
    """

    a: GemmPlan | None
    b: GemmPlan | None
    fit: bool


def gradients(
    how: Rule,
    options: GradientOptions,
    dd: torch.Tensor,
    kept: Sequence[torch.Tensor],
    tensors: Tensors,
) -> Tensors:
    """The gradients that the rule of a layer asks for, by place."""
    results: Results = [None] * len(how.needed)
    metadata, bias, dtype = how.metadata, how.bias, how.metadata[B].dtype
    dz, sums = dd, None
    if how.way != "linear":
        function = how.items[-1][1]
        found, sums = activation_backward(dd, kept[-1], function, sums=bias != 0, out_dtype=dtype)
        dz = dd if found is None else found
    elif bias:
        sums = activation_backward(dd, sums=True)[1]
    if bias and sums is not None:
        wanted = metadata[bias].dtype
        results[bias] = sums if wanted == torch.float32 else sums.to(wanted)
    if dz.dtype != dtype:
        dz = dz.to(dtype)
    if not _by_plans(how, options, dz, tensors, results):
        _by_products(how, options, dz, tensors, results)
    return tuple(results)


def _by_plans(
    how: Rule, options: GradientOptions, dz: torch.Tensor, tensors: Tensors, results: Results
) -> bool:
    """Have the plans of an earlier backward pass compute the products; False where none fit."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    a, b = tensors[A], tensors[B]
    kind = (
        options.accumulation,
        options.accumulate_into is None,
        dz.shape,
        dz.stride(),
        dz.data_ptr() & 15,
        dz.get_device(),
        None if a is None else _layout(a),
        None if b is None else _layout(b),
    )
    try:
        found: Plans | None = how.plans.get(kind)
        if found is None:
            found = _planned(how, options, dz, tensors)
            remember(how.plans, kind, found, _BOUND)
        if not found.fit:
            return False
        if found.a is not None and b is not None:
            if how.metadata[A].column_major:
                results[A] = _run(found.a, b, dz).mT
            else:
                results[A] = _run(found.a, dz, b)
        if found.b is not None and a is not None:
            if how.metadata[B].column_major:
                gradient = _run(found.b, dz, a)
                results[B] = gradient if how.of_weight else gradient.mT
            else:
                gradient = _run(found.b, a, dz)
                results[B] = gradient.mT if how.of_weight else gradient
    except WithoutMemoryError:  # torch knows which code is to see these tensors
        return False
    return True


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """How a tensor lies, which hooks on what is saved may have changed."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.data_ptr() & 15,
        tensor.get_device(),
    )


def _run(plan: GemmPlan, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Launch a plan on two operands, which may be its own with other dimensions: as they lie."""
    details, launch = plan.details, plan.launch
    if launch is None:
        raise AssertionError("plans that fit have a launch")
    d = left.new_empty(details.out_shape, dtype=details.out_dtype)
    addresses = (left.data_ptr(), right.data_ptr(), d.data_ptr())
    launch.run(addresses, (), _check, plan, left, right, d)
    return d


def _check(plan: GemmPlan, left: torch.Tensor, right: torch.Tensor, d: torch.Tensor) -> None:
    GemmCall(left, right).check(plan.details, d)


def _planned(how: Rule, options: GradientOptions, dz: torch.Tensor, tensors: Tensors) -> Plans:
    """The plans for operands that lie as these do."""
    dtype, accumulation = how.metadata[B].dtype, options.accumulation
    a, b = tensors[A], tensors[B]
    of_a = of_b = None
    fit = options.accumulate_into is None
    if how.needed[A] and b is not None:
        weight = b if how.of_weight else b.mT
        factors = (weight.mT, dz.mT) if how.metadata[A].column_major else (dz, weight)
        of_a = _plan(*factors, dtype, accumulation)
    if how.needed[B] and a is not None:
        x, dx = matrix(a), matrix(dz)
        fit = fit and (x.data_ptr(), dx.data_ptr()) == (a.data_ptr(), dz.data_ptr())
        factors = (dx.mT, x) if how.metadata[B].column_major else (x.mT, dx)
        of_b = _plan(*factors, dtype, accumulation)
    made = [plan for plan in (of_a, of_b) if plan is not None]
    fit = fit and all(plan.launch is not None and not plan.copies for plan in made)
    return Plans(of_a, of_b, fit)


def _plan(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, accumulation: Accumulation
) -> GemmPlan:
    call = GemmCall(a, b, (), None, dtype, accumulation)
    return known.get(call.signature()) or plans.plan(call)


def _by_products(
    how: Rule, options: GradientOptions, dz: torch.Tensor, tensors: Tensors, results: Results
) -> None:
    """Compute the products as calls."""
    dtype, metadata = how.metadata[B].dtype, how.metadata
    a, b = tensors[A], tensors[B]
    accumulation = options.accumulation
    if how.needed[A] and b is not None:
        weight = b if how.of_weight else b.mT
        if metadata[A].column_major:
            results[A] = product(weight.mT, dz.mT, (), dtype, accumulation).mT
        else:
            results[A] = product(dz, weight, (), dtype, accumulation)
    if how.needed[B] and a is not None:
        if a.dim() != 2:
            a, dz = matrix(a), matrix(dz)
        if options.accumulate_into is not None:
            gradient_products.add(a.mT, dz, ((), None), options.accumulate_into, accumulation)
        elif metadata[B].column_major:
            results[B] = product(dz.mT, a, (), dtype, accumulation).mT
        else:
            results[B] = product(a.mT, dz, (), dtype, accumulation)
        if how.of_weight and (gradient := results[B]) is not None:
            results[B] = gradient.mT
