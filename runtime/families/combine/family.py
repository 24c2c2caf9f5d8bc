"""Both directions, as measuring and building ahead of time ask for them."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.families.combine import CombineOperation, CombineShape
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.call import Call
from warploom.runtime.families.combine import reference
from warploom.runtime.families.combine.api import combine
from warploom.runtime.families.combine.call import CombineCall
from warploom.runtime.families.combine.trial import CombineTrial, draw
from warploom.runtime.family import RuntimeFamily


class CombineRuntime(RuntimeFamily[CombineOperation, CombineShape]):
    """Calls of `combine` and `permute`."""

    function = staticmethod(combine)
    operands = 3

    def call(self, *operands: Any, **keywords: Any) -> CombineCall:
        """The call that `combine` makes, for `explain`."""
        keywords.pop("offsets", None)  # they are the gradient's
        return CombineCall(*operands, **keywords)

    def trial(
        self, operation: CombineOperation, shape: CombineShape, device: str, seed: int
    ) -> CombineTrial:
        """Random calls: see trial.py."""
        return CombineTrial(operation, shape, device, seed)

    def calls(self, operation: CombineOperation, shape: CombineShape) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [draw(operation, shape, "meta", None)]

    def baselines(self, operation: CombineOperation, trial: CombineTrial) -> list[Baseline]:
        """The expression in torch, eager and compiled."""
        if operation.direction == "combine":
            summed = [(one.rows, one.inverse, one.weights) for one in trial.sets]  # type: ignore[union-attr]
            return eager_and_compiled(_combined, summed)
        given = [(one.hidden, one.inverse, one.weights, one.combined) for one in trial.sets]  # type: ignore[union-attr]
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
