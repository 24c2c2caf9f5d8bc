"""The gradients of a GEMM: of A and B, which are GEMMs too, and of what the epilogue reads.

A gradient goes from D through the epilogue's steps to A B, whose other operand it is multiplied
with: where that lies, and in the layout that the operand has, so that the gradient of a torch
weight, which is b after .t(), is row-major for it. Scales of the call are steps of these GEMMs.
How a call is differentiated, and what is kept for that, says gradient_rule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NoReturn, TypeVar, cast

import torch
from torch.autograd import forward_ad

from warploom.errors import ProblemError
from warploom.generator.epilogue import Activation, Bias, Gate, Residual, Scale
from warploom.generator.families.gemm import Accumulation
from warploom.generator.step import Reads
from warploom.runtime.families._product.operands import broadcast, matrix, result_type
from warploom.runtime.families._product.reference import apply
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.gate import layout_of
from warploom.runtime.families._product.steps.gate_gradient import of_both
from warploom.runtime.families._product.steps.operand import Extents, natural
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.gradient_rule import (
    A,
    B,
    GradientOptions,
    Metadata,
    Place,
    Rule,
    is_column_major,
)
from warploom.runtime.operands import dense_copy
from warploom.runtime.plan import planned
from warploom.runtime.tensors import WithoutMemoryError, refuse_dual

Tensors = Sequence[torch.Tensor | None]
TensorsT = TypeVar("TensorsT", bound=Tensors)


def refuse_second_derivative(*_: object) -> NoReturn:
    """Raise ProblemError where the gradients of a gemm are differentiated themselves."""
    raise ProblemError(
        "a second derivative of warploom.gemm",
        rule="gemm is differentiable once",
        fix="leave out create_graph=True, or compute this product with plain torch operations",
    )


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
        dz, found = composite(how, tensors, numbers, dd, accumulation)
        x = None if dz is None else Passing(dz)
    else:
        x, found = passed(how, tensors, numbers, z, dd, accumulation)
    results: list[torch.Tensor | None] = [found.get(place) for place in range(len(how.needed))]
    if x is None:
        return tuple(results)
    gradient = Gradient(x.of, x.scales, accumulation, dtype)
    a, b = tensors[A], tensors[B]
    if how.needed[A] and b is not None:
        results[A] = of_a(gradient, how.metadata[A], b)
    if how.needed[B] and a is not None:
        results[B] = of_b(gradient, a, how.metadata[B], into)
    return tuple(results)


# ---- Through the epilogue ------------------------------------------------------------------------

Found = dict[Place, torch.Tensor]  # gradients of the items' tensors


@dataclass(slots=True)
class Scales:
    """What the gradient of A B is still to be multiplied with.

    number    the scales that the host knows
    ones      fp32 tensors of one element
    rows      fp32, an element for each row of D [.., m]; None: none
    columns   the same of columns [.., n]
    """

    number: float = 1.0
    ones: list[torch.Tensor] = field(default_factory=list)
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def steps(self) -> list[Item]:
        """Epilogue items that multiply by all but the vectors."""
        ones = self.ones
        if not ones and self.number == 1:
            return []
        while len(ones) > _STEPS:
            ones = [ones[0].reshape(()) * ones[1].reshape(()), *ones[2:]]
        number: list[Item] = [("scale", self.number)] if self.number != 1 else []
        return number + [("scale", one) for one in ones]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Times all but the vectors."""
        if self.number != 1:
            x = x * self.number
        for one in self.ones:
            x = x * one.reshape(())
        return x


@dataclass(slots=True)
class Passing:
    """A gradient on its way from D to the products: `of` [.., m, n] times `scales`.

    sums    of the columns of `of` over all rows, in fp32, where they are known
    """

    of: torch.Tensor
    scales: Scales = field(default_factory=Scales)
    sums: torch.Tensor | None = None

    def column_sums(self) -> torch.Tensor:
        """The sums; they are computed once."""
        if self.sums is None:
            self.sums = activation_backward(self.of, sums=True)[1]
        return cast("torch.Tensor", self.sums)


def passed(
    rule: Rule,
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[object],
    kept: torch.Tensor | None,
    g: torch.Tensor,
    accumulation: Accumulation,
) -> tuple[Passing, Found]:
    """What `g`, the gradient of D, is behind all items, and their tensors' gradients.

    `kept` is what the activation was given, or D in its place. Scales are left to who multiplies.
    """
    listed = rule.listed(tensors, numbers)
    x, found = Passing(g), Found()
    at = Extents(g.shape[:-2], g.shape[-2], g.shape[-1])
    for index in reversed(range(len(listed))):
        item, asked = listed[index], rule.items[index]
        kind = step_of(item).step
        if kind is Scale:
            _scale(x.scales, item, at)
        elif kind is Activation and rule.way != "linear":
            _activate(x, rule, tensors, listed[:index], item[1], kept, accumulation)
        elif kind is Gate and rule.way != "linear":
            _pass_gate(x, rule, tensors, listed[: index + 1], kept, accumulation)
            at = replace(at, n=x.of.shape[-1])
        elif kind is Bias and rule.needed[asked[1]]:
            found[asked[1]] = _of_bias(x, rule.metadata[asked[1]], at)
        elif kind is Residual and rule.needed[asked[1]]:
            found[asked[1]] = _of_residual(x, item[2], rule.metadata[asked[1]], at)
    return x, found


def _activate(
    x: Passing,
    rule: Rule,
    tensors: Sequence[torch.Tensor | None],
    before: Sequence[Item],
    function: str,
    kept: torch.Tensor | None,
    accumulation: Accumulation,
) -> None:
    """Take a gradient past the activation."""
    a, b = tensors[A], tensors[B]
    dtype = factor_type(rule.metadata[A].dtype)
    n = x.of.shape[-1]
    biases = [one[1] for one in rule.items[: len(before)] if one[0] == "bias"]
    # The gradient of a bias of all rows comes from the same pass.
    sums = any(rule.needed[place] and prod(rule.metadata[place].shape) == n for place in biases)
    if kept is None and a is not None and b is not None:
        steps: list[Item] = [*before, (f"{function}_gradient", x.of)]
        x.sums = x.of.new_empty(n, dtype=torch.float32) if sums else None
        if x.sums is not None:
            steps.append(("column_sum", x.sums))
        x.of = product(a, b, steps, dtype, accumulation)
        return
    dz, x.sums = activation_backward(x.of, kept, function, sums=sums, out_dtype=dtype)
    x.of = cast("torch.Tensor", dz)


def _pass_gate(
    x: Passing,
    rule: Rule,
    tensors: Sequence[torch.Tensor | None],
    listed: Sequence[Item],
    kept: torch.Tensor | None,
    accumulation: Accumulation,
) -> None:
    """Take a gradient past a gate, the last of the items: to both halves of its columns."""
    *before, gate = listed
    a, b = tensors[A], tensors[B]
    dtype = factor_type(rule.metadata[A].dtype)
    if kept is None and a is not None and b is not None:
        kept = product(a, b, before, dtype, accumulation)
    z = cast("torch.Tensor", kept)
    x.of = of_both(x.of.float(), z.float(), gate[1], layout_of(gate)).to(dtype)


def _of_bias(x: Passing, like: Metadata, at: Extents) -> torch.Tensor:
    if prod(like.shape) == at.n:
        return x.scales.of(x.column_sums()).to(like.dtype).reshape(like.shape)
    sums = _summed(x.of.sum(-2, dtype=torch.float32), "column", like, at)
    return x.scales.of(sums).to(like.dtype)


def composite(
    rule: Rule,
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    g: torch.Tensor,
    accumulation: Accumulation,
) -> tuple[torch.Tensor | None, Found]:
    """The gradient of A B in fp32, and the items': torch's own, of the steps on new products."""
    a, b = tensors[A], tensors[B]
    if a is None or b is None:
        raise AssertionError("the operands are kept for this")
    x = product(a, b, (), torch.float32, accumulation)
    wanted = [place for place, needed in enumerate(rule.needed) if needed and place > B]
    with torch.enable_grad():
        x = x.detach().requires_grad_(rule.needed[A] or rule.needed[B])
        leaves = {
            place: one.detach().requires_grad_()
            for place, one in enumerate(tensors)
            if place in wanted and one is not None
        }
        given = [leaves.get(place, one) for place, one in enumerate(tensors)]
        d = apply(x, rule.listed(given, numbers))
        asked = [x] * x.requires_grad + list(leaves.values())
        found = list(torch.autograd.grad(d, asked, g.to(d.dtype)))
    of_products = found.pop(0) if x.requires_grad else None
    return of_products, dict(zip(leaves, found, strict=True))


def _scale(scales: Scales, item: Item, at: Extents) -> None:
    """Multiply by one more scale."""
    value, reads = item[1], step_of(item).reads(item)
    if not isinstance(value, torch.Tensor):
        scales.number *= value
    elif reads == "row":
        scales.rows = _times(scales.rows, natural(reads, value, at))
    elif reads == "column":
        scales.columns = _times(scales.columns, natural(reads, value, at))
    else:
        scales.ones.append(value)


def _times(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None or other is None else one * other


def _of_residual(x: Passing, beta: float, like: Metadata, at: Extents) -> torch.Tensor:
    if not beta:
        return x.of.new_zeros(like.shape, dtype=like.dtype)
    plain = beta == 1 and x.scales.number == 1 and not x.scales.ones
    found = x.of if plain else x.scales.of(x.of.float() * beta)
    return _summed(found, "fragment", like, at).to(like.dtype)


def _summed(x: torch.Tensor, reads: Reads, like: Metadata, at: Extents) -> torch.Tensor:
    """Values [*batches, *own] summed over the batches that a tensor `like` this broadcasts to."""
    if x.numel() != prod(like.shape):
        seen = natural(reads, torch.empty(like.shape, device="meta"), at)
        x = x.float() if seen is None else x.float().sum_to_size(seen.shape)
    return x.reshape(like.shape)


# ---- Of A and B ----------------------------------------------------------------------------------

E5M2 = torch.float8_e5m2
_STEPS = 3  # tensors of one element that a product scales by; more are multiplied before


@dataclass(slots=True)
class Gradient:
    """That of A B: `of` [.., m, n] times `scales`."""

    of: torch.Tensor
    scales: Scales
    accumulation: Accumulation
    dtype: torch.dtype  # in which it is multiplied with operands of fp8

    def by_rows(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[Item]]:
        """It for products over the columns of D: what is multiplied, and what scales them."""
        columns = self.scales.columns
        return self._lowered(None if columns is None else columns.unsqueeze(-2), dtype)

    def by_columns(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[Item]]:
        """It for products over the rows of D."""
        rows = self.scales.rows
        return self._lowered(None if rows is None else rows.unsqueeze(-1), dtype)

    def _lowered(
        self, vector: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[Item]]:
        """Times a vector, in a type that multiplies with an operand of `dtype`."""
        x = self.of if vector is None else self.of * vector
        steps = self.scales.steps()
        if dtype.itemsize == 1 and self.dtype == E5M2:
            inverse = (x.abs().amax().float() / torch.finfo(E5M2).max).clamp(min=2.0**-126)
            return (x / inverse).to(E5M2), [*steps, ("scale", inverse)]
        lowered = factor_type(dtype)
        return x if x.dtype == lowered else x.to(lowered), steps


def factor_type(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit type that operands of `dtype` are multiplied in, with a gradient of 16 bits."""
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    steps: Sequence[Item],
    dtype: torch.dtype | None,
    accumulation: Accumulation,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One product of a gradient, as a plan or, for compilers and modes, as an operator."""
    call = GemmCall(a, b, steps, out, dtype, accumulation == "fast")
    if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0):
        try:
            return planned(call).run(call)
        except WithoutMemoryError:  # torch knows which code is to see these tensors
            pass
    call.out_dtype = result_type(a, out, dtype, len(steps) > 0)
    return call.dispatched()


def of_a(dz: Gradient, a: Metadata, b: torch.Tensor) -> torch.Tensor:
    """The gradient of A [.., m, k]: dz B^T, summed over batches that were broadcast."""
    x, steps = dz.by_rows(b.dtype)
    factor, rows = _beside(b, x), dz.scales.rows
    if b.dim() > 2 and prod(b.shape[:-2]) == 1:  # of one B, all rows of A are one product
        if rows is not None:
            rows = rows.expand(x.shape[:-1]).reshape(a.shape[:-1])
        factor, x = factor.reshape(b.shape[-2:]), x.reshape(*a.shape[:-1], x.shape[-1])
    vector = None if rows is None else ("scale_row", rows)
    return _multiplied(x, factor.mT, (steps, vector), a, dz.accumulation)


def of_b(
    dz: Gradient, a: torch.Tensor, b: Metadata, accumulate_into: torch.Tensor | None
) -> torch.Tensor | None:
    """The gradient of B [.., k, n]: A^T dz, summed over batches that were broadcast.

    It is added to `accumulate_into` where that is given, and then not returned.
    """
    x, steps = dz.by_columns(a.dtype)
    factor, columns = _beside(a, x), dz.scales.columns
    if prod(b.shape[:-2]) == 1:  # all rows of A and of D are added up by one product
        if columns is not None and columns.dim() > 1:  # by batches of D, which are none here
            x, columns = (x * columns.unsqueeze(-2)).to(x.dtype), None
        factor, x = matrix(factor), matrix(x)
    vector = None if columns is None else ("scale_column", columns)
    if accumulate_into is None:
        return _multiplied(factor.mT, x, (steps, vector), b, dz.accumulation)
    add(factor.mT, x, (steps, vector), accumulate_into, dz.accumulation)
    return None


def _beside(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """An operand in the type of the gradient that it is multiplied with, which is exact."""
    return operand if x.dtype.itemsize == 1 or x.dtype == operand.dtype else operand.to(x.dtype)


Steps = tuple[Sequence[Item], Item | None]  # those of a product, and one with a vector


def _multiplied(
    a: torch.Tensor, b: torch.Tensor, steps: Steps, like: Metadata, accumulation: Accumulation
) -> torch.Tensor:
    """A product in the type and layout of `like`, and summed to its shape."""
    dtype = factor_type(like.dtype)
    if len(like.shape) == 2 == a.dim() == b.dim():
        return _laid_out(a, b, steps, dtype, accumulation, transposed=like.column_major)
    lead = broadcast(a, b)
    shape = tuple(like.shape)
    if prod(shape[:-2]) == prod(lead):
        return _laid_out(a, b, steps, dtype, accumulation, transposed=like.column_major).reshape(
            shape
        )
    wide = _laid_out(a, b, steps, torch.float32, accumulation, transposed=like.column_major)
    return wide.sum_to_size(shape).to(dtype)


def _laid_out(
    a: torch.Tensor,
    b: torch.Tensor,
    steps: Steps,
    dtype: torch.dtype,
    accumulation: Accumulation,
    *,
    transposed: bool,
) -> torch.Tensor:
    """A product; `transposed`, its transpose is computed, of b and a, and turned back."""
    if transposed:
        return product(b.mT, a.mT, _steps(steps, transposed=True), dtype, accumulation).mT
    return product(a, b, _steps(steps, transposed=False), dtype, accumulation)


def add(
    a: torch.Tensor,
    b: torch.Tensor,
    steps: Steps,
    into: torch.Tensor,
    accumulation: Accumulation,
) -> None:
    """Add a product to a tensor: as its kernel's residual, where that can write there."""
    across = is_column_major(into)
    room = into.mT if across else into
    if room.shape[:-2] != broadcast(a, b):
        wide = _laid_out(a, b, steps, torch.float32, accumulation, transposed=across)
        into.add_(wide.sum_to_size(into.shape))
        return
    if into.dim() > 2 and not room.is_contiguous():
        into.add_(_laid_out(a, b, steps, torch.float32, accumulation, transposed=across))
        return
    if across:
        a, b = b.mT, a.mT
    listed = [*_steps(steps, transposed=across), ("residual", room, 1.0)]
    product(a, b, listed, torch.float32, accumulation, room)


def _steps(steps: Steps, *, transposed: bool) -> Sequence[Item]:
    """Items of a product, with a vector over rows for one over columns where it is transposed."""
    listed, vector = steps
    if vector is None:
        return listed
    kind, value = vector
    if transposed:
        kind = "scale_row" if kind == "scale_column" else "scale_column"
    return [*listed, (kind, value)]
