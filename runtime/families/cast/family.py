"""Casts, as measuring and building ahead of time ask for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from warploom.generator.families.cast import CastOperation, CastShape
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.elements import TORCH
from warploom.runtime.families.cast import reference
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.cast.call import CastCall, Details
from warploom.runtime.sampled import CallTrial, Results, SampledFamily, bits_share
from warploom.runtime.tensors import normal


class CastRuntime(SampledFamily[CastOperation, CastShape]):
    """Calls of `cast`."""

    function = staticmethod(cast)
    operands = 1
    called = CastCall

    def draw(
        self,
        operation: CastOperation,
        shape: CastShape,
        device: str,
        random: torch.Generator | None,
    ) -> CastCall:
        """A call with normal operands, whose results have their places; on `meta`, undrawn."""

        def drawn(columns: int) -> torch.Tensor:
            values = normal((shape.m, columns), random, device)
            return values.to(TORCH[operation.x])

        is_gate, gradient = operation.gate != "none", None
        x = drawn(2 * shape.n if is_gate and not operation.gradient else shape.n)
        if operation.gradient:
            gradient = drawn(shape.n // 2)
        call = CastCall(
            x,
            TORCH[operation.q],
            operation.block,
            operation.transpose,
            pow2=operation.pow2,
            rounding=operation.rounding,
            gate=operation.gate if is_gate else None,
            gradient=gradient,
        )
        if operation.static:
            (_, scale, _, _) = call.results(Details(()))
            assert scale is not None  # noqa: S101 (as none was given)
            call.scale = scale.fill_(2.0**-6)
        if operation.rounding == "stochastic":
            call.rounding_state = torch.arange(2, device=device)
        if operation.amax:
            call.amax = torch.zeros(1, device=device)
        call.out, call.scale_out, call.out_t, call.scale_t_out = call.results(Details(()))
        return call

    def expected(self, call: CastCall) -> reference.Results:
        """What the results are, by plain torch operations on the same device."""
        blank = replace(
            call, out=None, scale_out=None, out_t=None, scale_t_out=None, amax=None, spec=None
        )
        made = blank.results(Details(()))
        blank.compute(Details(()), made)
        return made

    def share(self, results: Results, expected: Results) -> float:
        """0 where all bits are right, else more than 1."""
        return bits_share(results, expected)

    def baselines(self, operation: CastOperation, trial: CallTrial) -> list[Baseline]:
        """The expression in torch, eager and compiled."""
        first = trial.sets[0]
        if first.rounding_state is not None:
            return []  # torch rounds to nearest alone
        options = reference.Options(first.dtype, first.blocks, first.transpose, first.pow2)
        function = partial(_cast, options)
        return eager_and_compiled(function, [(one.x, one.scale) for one in trial.sets])


def _cast(
    options: reference.Options, x: torch.Tensor, scale: torch.Tensor | None
) -> list[torch.Tensor]:
    return [one for one in reference.cast(x, options, scale) if one is not None]


FAMILY = CastRuntime()
