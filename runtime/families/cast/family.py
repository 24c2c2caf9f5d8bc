"""Casts, as measuring and building ahead of time ask for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from warploom.generator.families.cast import CastOperation, CastShape
from warploom.generator.families.cast.schedule import COLUMNS
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.elements import TORCH
from warploom.runtime.families.cast import reference
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.cast.call import AnyCast, Cast, Details, call_of
from warploom.runtime.sampled import CallTrial, Results, SampledFamily, bits_share
from warploom.runtime.tensors import normal

GROUPS = 8  # of rows, as many in each, of sampled calls


class CastRuntime(SampledFamily[CastOperation, CastShape]):
    """Calls of `cast`."""

    function = staticmethod(cast)
    operands = 1
    called = staticmethod(call_of)

    def draw(
        self,
        operation: CastOperation,
        shape: CastShape,
        device: str,
        random: torch.Generator | None,
    ) -> AnyCast:
        """A call with normal operands, whose results have their places; on `meta`, undrawn."""

        def drawn(columns: int) -> torch.Tensor:
            values = normal((shape.m, columns), random, device)
            return values.to(TORCH[operation.x])

        is_gate, gradient = operation.gate != "none", None
        x = drawn(2 * shape.n if is_gate and not operation.gradient else shape.n)
        if operation.gradient:
            gradient = drawn(shape.n // 2)
        ends = torch.arange(1, GROUPS + 1, device=device) * shape.m // GROUPS
        call = call_of(
            x,
            TORCH[operation.q],
            offsets=ends.to(torch.int32) if operation.offsets else None,
            block=operation.block,
            transpose=operation.transpose,
            pow2=operation.pow2,
            rounding=operation.rounding,
            gate=operation.gate if is_gate else None,
            gradient=gradient,
        )
        if operation.static:
            scales = call.results(Details(()))[1:4:2]  # of x and, where it has its own, of x.T
            call.scale, call.scale_t = (s if s is None else s.fill_(2.0**-6) for s in scales)
        if operation.rounding == "stochastic":
            call.rounding_state = torch.arange(2, device=device)
        if operation.amax:
            call.amax = torch.zeros(1, device=device)
        for name, one in zip(call.declaration.results, call.results(Details(())), strict=True):
            setattr(call, name, one)
        return call

    def expected(self, call: Cast) -> reference.Results:
        """What the results are, by plain torch operations on the same device."""
        places = (*call.declaration.results, "amax", "spec")
        blank: Cast = replace(call, **dict.fromkeys(places))  # type: ignore[arg-type]
        made = blank.results(Details(()))
        blank.compute(Details(()), made)
        return made

    def share(self, results: Results, expected: Results) -> float:
        """0 where all bits are right, else more than 1; of x.T those that groups have."""
        return bits_share(*(_of_groups(one, expected) for one in (results, expected)))

    def baselines(self, operation: CastOperation, trial: CallTrial) -> list[Baseline]:
        """The expression in torch, eager and compiled."""
        first = trial.sets[0]
        if first.rounding_state is not None or first.offsets is not None:
            return []  # torch rounds to nearest alone, and has no function of groups
        options = reference.Options(first.dtype, first.blocks, first.transpose, first.pow2)
        function = partial(_cast, options)
        given = [(one.x, one.scale, one.scale_t) for one in trial.sets]
        return eager_and_compiled(function, given)


def _of_groups(results: Results, expected: Results) -> Results:
    """Results without the columns of x.T past the last group, which are not written."""
    if len(expected) < 5:
        return results
    q, scale, q_t, scale_t, ends = results
    last = 0 if expected[4] is None else int(expected[4][-1])
    if scale_t is not None and scale_t.shape[1] > 1:
        scale_t = scale_t[:, : last // COLUMNS]
    return q, scale, None if q_t is None else q_t[:, :last], scale_t, ends


def _cast(
    options: reference.Options,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    scale_t: torch.Tensor | None,
) -> list[torch.Tensor]:
    return [one for one in reference.cast(x, options, (scale, scale_t)) if one is not None]


FAMILY = CastRuntime()
