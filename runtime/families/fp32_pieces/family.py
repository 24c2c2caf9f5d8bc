"""Pieces of fp32 matrices, as measuring and building ahead of time ask for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from warploom.generator.families.fp32_pieces import Fp32PiecesOperation, Fp32PiecesShape
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.elements import TORCH
from warploom.runtime.families.fp32_pieces import reference
from warploom.runtime.families.fp32_pieces.api import fp32_pieces
from warploom.runtime.families.fp32_pieces.call import Details, Fp32PiecesCall
from warploom.runtime.sampled import CallTrial, Results, SampledFamily, bits_share
from warploom.runtime.tensors import normal

WIDE = torch.tensor([1, 1, 1, 0], dtype=torch.int32)
"""What a matrix spans whose fp16 pieces do not hold it."""


class Fp32PiecesRuntime(SampledFamily[Fp32PiecesOperation, Fp32PiecesShape]):
    """Calls of `fp32_pieces`."""

    function = staticmethod(fp32_pieces)
    operands = 1
    called = Fp32PiecesCall

    def draw(
        self,
        operation: Fp32PiecesOperation,
        shape: Fp32PiecesShape,
        device: str,
        random: torch.Generator | None,
    ) -> Fp32PiecesCall:
        """A call with a normal operand, whose results have their places; on `meta`, undrawn."""
        extents = (shape.m, shape.k) if operation.layout == "row" else (shape.k, shape.m)
        x = normal(extents, random, device)
        x = x if operation.layout == "row" else x.t()
        call = Fp32PiecesCall(x, TORCH[operation.q], operation.count)
        if operation.spans == "wide":
            call.scale = torch.ones(3, shape.m, device=device)
            call.span_a = call.span_b = WIDE.to(device)
        call.out, call.scale_out, call.span_out = call.results(Details(()))
        return call

    def expected(self, call: Fp32PiecesCall) -> Results:
        """What the results are, by plain torch operations on the same device."""
        blank = replace(call, out=None, scale_out=None, span_out=None, spec=None)
        made = blank.results(Details(()))
        blank.compute(Details(()), made)
        return made

    def share(self, results: Results, expected: Results) -> float:
        """0 where all bits are right, else more than 1; zero has no sign that counts."""
        plain = [[None if one is None else one + 0 for one in each] for each in (results, expected)]
        return bits_share(*plain)

    def baselines(self, operation: Fp32PiecesOperation, trial: CallTrial) -> list[Baseline]:
        """The expression in torch, eager and compiled."""
        function = partial(_pieces, operation)
        return eager_and_compiled(function, [(one.x,) for one in trial.sets])


def _pieces(operation: Fp32PiecesOperation, x: torch.Tensor) -> list[torch.Tensor]:
    return [*reference.pieces(x, TORCH[operation.q], operation.count)]


FAMILY = Fp32PiecesRuntime()
