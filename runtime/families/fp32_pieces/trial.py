"""Calls on random operands, and what their results are."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import torch

from warploom.generator.families.fp32_pieces import Fp32PiecesOperation, Fp32PiecesShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import measure
from warploom.runtime.elements import TORCH
from warploom.runtime.families.fp32_pieces.call import Details, Fp32PiecesCall, Results
from warploom.runtime.plan import run
from warploom.runtime.trial import generator, sets_for, wrong

WIDE = torch.tensor([1, 1, 1, 0], dtype=torch.int32)
"""What a matrix spans whose fp16 pieces do not hold it."""


def draw(
    operation: Fp32PiecesOperation,
    shape: Fp32PiecesShape,
    device: str,
    random: torch.Generator | None,
) -> Fp32PiecesCall:
    """A call with a normal operand, whose results have their places; on `meta`, undrawn."""
    extents = (shape.m, shape.k) if operation.layout == "row" else (shape.k, shape.m)
    x = torch.randn(*extents, generator=random, device=device)
    x = x if operation.layout == "row" else x.t()
    call = Fp32PiecesCall(x, TORCH[operation.q], operation.count)
    if operation.spans == "wide":
        call.scale = torch.ones(3, shape.m, device=device)
        call.span_a = call.span_b = WIDE.to(device)
    call.out, call.scale_out, call.span_out = call.results(Details(()))
    return call


def expected(call: Fp32PiecesCall) -> Results:
    """What the results are, by plain torch operations on the same device."""
    blank = replace(call, out=None, scale_out=None, span_out=None, spec=None)
    made = blank.results(Details(()))
    blank.compute(Details(()), made)
    return made


def share(results: Results, right: Results) -> float:
    """0 where all bits are right, else more than 1: how many numbers differ, and one more."""
    wrong_bits = 0
    for one, other in zip(results, right, strict=True):
        if one is None or other is None:
            continue
        integer = torch.int16 if one.dtype.itemsize == 2 else torch.int32
        differ = one.view(integer) != other.view(integer)
        # NaN is as good as any other, and zero has no sign that counts.
        differ &= ~(one.isnan() & other.isnan()) & ~((one == 0) & (other == 0))
        wrong_bits += int(differ.sum())
    return float(wrong_bits + 1 if wrong_bits else 0)


class Fp32PiecesTrial:
    """Calls of which all results are held against plain torch operations."""

    def __init__(
        self, operation: Fp32PiecesOperation, shape: Fp32PiecesShape, device: str, seed: int
    ) -> None:
        random = generator(device, seed)
        sets = sets_for(shape.m * shape.k * operation.value_bytes, device)
        self.sets = [draw(operation, shape, device, random) for _ in range(sets)]

    def calls(self, spec: KernelSpec) -> list[measure.Call]:
        """One call of `spec` for each set of operands."""
        return [partial(run, replace(one, spec=spec)) for one in self.sets]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        for one in self.results:
            one.copy_(wrong(one))
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        first = self.sets[0]
        return share((first.out, first.scale_out, first.span_out), self._expected)

    @property
    def results(self) -> list[torch.Tensor]:
        """What the first set has of q, scales and span."""
        found = self.sets[0].out, self.sets[0].scale_out, self.sets[0].span_out
        return [one for one in found if one is not None]

    @cached_property
    def _expected(self) -> Results:
        return expected(self.sets[0])
