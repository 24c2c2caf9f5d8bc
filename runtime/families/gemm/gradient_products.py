"""The gradients of A and B: products of that of A B with the other operand, where it lies.

Each is computed in the layout that its operand has, so that the gradient of a torch weight, which
is b after .t(), is row-major for it. Scales of the call are steps of these products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from warploom.generator.families.gemm import Accumulation
from warploom.runtime.families._product.operands import broadcast, matrix
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm import plan as plans
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.gradient_rule import Metadata, is_column_major
from warploom.runtime.tensors import WithoutMemoryError

E5M2 = torch.float8_e5m2
_STEPS = 3  # tensors of one element that a product scales by; more are multiplied before


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
    if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0):
        try:
            return plans.gemm(GemmCall(a, b, steps, out, dtype, accumulation))
        except WithoutMemoryError:  # torch knows which code is to see these tensors
            pass
    from warploom.runtime.families.gemm import operators  # which imports this module

    return operators.call(a, b, steps, out, dtype, accumulation, None)


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
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(into)  # kernels write what torch does not see


def _steps(steps: Steps, *, transposed: bool) -> Sequence[Item]:
    """Items of a product, with a vector over rows for one over columns where it is transposed."""
    listed, vector = steps
    if vector is None:
        return listed
    kind, value = vector
    if transposed:
        kind = "scale_row" if kind == "scale_column" else "scale_column"
    return [*listed, (kind, value)]
