"""Both directions, as measuring and building ahead of time ask for them."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.families.combine import CombineOperation, CombineShape
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.elements import TORCH
from warploom.runtime.families.combine import reference
from warploom.runtime.families.combine.api import combine
from warploom.runtime.families.combine.call import CombineCall, PermuteCall
from warploom.runtime.sampled import Bound, CallTrial, SampledFamily
from warploom.runtime.tensors import normal
from warploom.runtime.trial import wrong


class CombineRuntime(SampledFamily[CombineOperation, CombineShape]):
    """Calls of `combine` and `permute`."""

    function = staticmethod(combine)
    operands = 3

    def call(self, *operands: Any, **keywords: Any) -> CombineCall:
        """The call that `combine` makes, for `explain`."""
        keywords.pop("offsets", None)  # they are the gradient's
        return CombineCall(*operands, **keywords)

    def draw(
        self,
        operation: CombineOperation,
        shape: CombineShape,
        device: str,
        random: torch.Generator | None,
    ) -> CombineCall | PermuteCall:
        """A call with normal operands, whose results have their places; on `meta`, undrawn."""
        tokens, k, columns = shape.tokens, shape.k, shape.columns
        dtype = TORCH[operation.values]

        def drawn(*extents: int, name: str = operation.values) -> torch.Tensor:
            return normal(extents, random, device).to(TORCH[name])

        weights = None if operation.weights == "none" else drawn(tokens, k, name=operation.weights)
        order = torch.randperm(tokens * k, generator=random, device=device)
        inverse = order.int().reshape(tokens, k)
        if operation.direction == "combine":
            call = CombineCall(drawn(tokens * k, columns), inverse, weights)
            call.out = wrong(torch.empty(tokens, columns, dtype=dtype, device=device))
            return call
        combined = drawn(tokens * k, columns) if operation.dot else None
        made = PermuteCall(drawn(tokens, columns), inverse, weights, combined)
        made.out = wrong(torch.empty(tokens * k, columns, dtype=dtype, device=device))
        if operation.dot and weights is not None:
            made.gradient_out = wrong(torch.empty_like(weights))
        return made

    def results(self, call: CombineCall | PermuteCall) -> list[torch.Tensor]:
        """The results that a call has its places for."""
        return [one for one in super().results(call) if one is not None]

    def expected(self, call: CombineCall | PermuteCall) -> list[Bound]:
        """What the results are in float64, and how far off those of a kernel may be."""
        if isinstance(call, CombineCall):
            return [reference.sum_bound(call.rows, call.inverse, call.weights)]
        found = [reference.row_bound(call.hidden, call.inverse, call.weights, call.row_count)]
        if call.combined is not None and call.weights is not None:
            given = call.hidden, call.inverse, call.combined, call.weights.dtype
            found.append(reference.dot_bound(*given))
        return found

    def baselines(self, operation: CombineOperation, trial: CallTrial) -> list[Baseline]:
        """The expression in torch, eager and compiled."""
        if operation.direction == "combine":
            summed = [(one.rows, one.inverse, one.weights) for one in trial.sets]
            return eager_and_compiled(_combined, summed)
        given = [(one.hidden, one.inverse, one.weights, one.combined) for one in trial.sets]
        return eager_and_compiled(_permuted, given)


def _combined(
    rows: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    wide = None if weights is None else weights.float()
    return reference.combine(rows.float(), inverse, wide).to(rows.dtype)


def _permuted(
    hidden: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor | None,
    combined: torch.Tensor | None,
) -> list[torch.Tensor]:
    wide = None if weights is None else weights.float()
    rows = reference.permute(hidden.float(), inverse, wide, inverse.numel())
    found = [rows.to(hidden.dtype)]
    if combined is not None and weights is not None:
        dots = reference.weight_gradient(hidden.float(), inverse, combined.float())
        found.append(dots.to(weights.dtype))
    return found


FAMILY = CombineRuntime()
