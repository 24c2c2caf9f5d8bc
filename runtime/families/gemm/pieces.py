"""GEMMs of operands that are 16-bit pieces of fp32 values, as `warploom.fp32_pieces` makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from warploom.generator.families.gemm import GemmOperation, GemmShape, Spans
from warploom.runtime.arguments import declared, option, tensor
from warploom.runtime.families._product.call import Checked
from warploom.runtime.families._product.reference import apply, rounded, write_outputs
from warploom.runtime.families.fp32_pieces.reference import pieces_hold
from warploom.runtime.families.gemm.call import GemmCall


@declared
class PiecesCall(GemmCall):
    """A call whose a [.., M, pieces * K] and b [.., pieces * K, N] are pieces side by side along k.

    terms   the products of pieces that are added up: 3 of two pieces, 6 of three
    """

    terms: int = option(default=3, schema="")

    def checked(self) -> Checked:
        """Check the call as one of 16-bit operands, and have its kernel add up the products."""
        checked = GemmCall.checked(self)
        operation = replace(checked.operation, accumulation="promoted", terms=self.terms)
        problem = checked.problem
        k = problem.k // operation.pieces
        return replace(
            checked,
            operation=operation,
            problem=replace(problem, k=k, place=k),
            shape=GemmShape(problem.m, problem.n, k, problem.batches),
        )

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """D by plain torch operations: products of pieces in fp32, the smallest first."""
        return _reference(self, dtype, terms=self.terms)


@declared
class SpannedPiecesCall(PiecesCall):
    """A call that computes nothing if the other one of its pair does: see `pieces_hold`.

    span_a, span_b   what the rows of A and B span, as the launches of their fp16 pieces found it
    spans            narrow: it computes D if fp16 pieces hold these, wide: if they do not
    """

    span_a: torch.Tensor | None = tensor(default=None, schema="")
    span_b: torch.Tensor | None = tensor(default=None, schema="")
    spans: Spans = option(default="narrow", schema="")

    def checked(self) -> Checked:
        """Check the call, and have its kernel leave if it is not to compute D."""
        checked = PiecesCall.checked(self)
        return replace(checked, operation=replace(checked.operation, spans=self.spans))

    def compute(self, details: Checked, results: torch.Tensor) -> None:
        """Compute D by plain torch operations, if it is to."""
        assert self.span_a is not None and self.span_b is not None  # noqa: S101 (types)
        if pieces_hold(self.span_a, self.span_b) == (self.spans == "narrow"):
            PiecesCall.compute(self, details, results)


@declared
class UnsplitBCall(GemmCall):
    """A call whose a [.., M, terms * place] are bf16 pieces side by side along k, and b is bf16.

    terms   pieces of a, each of which is multiplied with b [.., K, N]
    """

    terms: int = option(default=3, schema="")

    @property
    def place(self) -> int:
        """Elements from a piece of a row to the next."""
        return self.a.shape[-1] // self.terms

    def checked(self) -> Checked:
        """Check the call as one of its first pieces, and have its kernel multiply all of them."""
        first = GemmCall.checked(replace(self, a=self.a[..., : self.b.shape[-2]]))
        terms: Any = {"accumulation": "promoted", "terms": self.terms, "whole_b": True}
        problem = replace(first.problem, place=self.place)
        return replace(first, operation=replace(first.operation, **terms), problem=problem)

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """D by plain torch operations: products of pieces in fp32, the smallest first."""
        return _reference(self, dtype, terms=self.terms, whole_b=True)


def _reference(call: GemmCall, dtype: torch.dtype, **pieces: Any) -> torch.Tensor:
    x = sum_of_products(call.a, call.b, torch.float32, **pieces)
    write_outputs(x, call.listed)
    return rounded(apply(x, call.listed), dtype, call.listed)


def sum_of_products(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, *, terms: int, whole_b: bool = False
) -> torch.Tensor:
    """The sum of the products of pieces that kernels add up, in a type and in their order.

    Args:
        a: [.., M, pieces * place].
        b: [.., pieces * place, N]; whole: [.., K, N], K being at most place.
        dtype: Of the products and of their sum.
        terms: As of `GemmOperation`, as is whole_b.
    """
    given: Any = {"terms": terms, "whole_b": whole_b}
    of = GemmOperation("bf16", "bf16", "fp32", **given)
    left, right = a.to(dtype).chunk(of.pieces, -1), b.to(dtype).chunk(of.pieces_b, -2)
    k = right[0].shape[-2]
    first, *others = [left[one][..., :k] @ right[other] for one, other in of.products]
    return sum(others, first)
