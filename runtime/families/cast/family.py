"""Casts, as measuring and building ahead of time ask for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from warploom.generator.families.cast import CastOperation, CastShape
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.call import Call
from warploom.runtime.families.cast import reference
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.cast.call import CastCall
from warploom.runtime.families.cast.trial import CastTrial, draw
from warploom.runtime.family import RuntimeFamily


class CastRuntime(RuntimeFamily[CastOperation, CastShape]):
    """Calls of `cast`."""

    function = staticmethod(cast)
    operands = 1

    def call(self, *operands: Any, **keywords: Any) -> CastCall:
        """The call that `cast` makes, for `explain`."""
        return CastCall(*operands, **keywords)

    def trial(
        self, operation: CastOperation, shape: CastShape, device: str, seed: int
    ) -> CastTrial:
        """Random calls: see trial.py."""
        return CastTrial(operation, shape, device, seed)

    def calls(self, operation: CastOperation, shape: CastShape) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [draw(operation, shape, "meta", None)]

    def baselines(self, operation: CastOperation, trial: CastTrial) -> list[Baseline]:
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
