"""Pieces of fp32 matrices, as measuring and building ahead of time ask for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from warploom.generator.families.fp32_pieces import Fp32PiecesOperation, Fp32PiecesShape
from warploom.runtime.baselines import Baseline, eager_and_compiled
from warploom.runtime.call import Call
from warploom.runtime.elements import TORCH
from warploom.runtime.families.fp32_pieces import reference
from warploom.runtime.families.fp32_pieces.api import fp32_pieces
from warploom.runtime.families.fp32_pieces.call import Fp32PiecesCall
from warploom.runtime.families.fp32_pieces.trial import Fp32PiecesTrial, draw
from warploom.runtime.family import RuntimeFamily


class Fp32PiecesRuntime(RuntimeFamily[Fp32PiecesOperation, Fp32PiecesShape]):
    """Calls of `fp32_pieces`."""

    function = staticmethod(fp32_pieces)
    operands = 1

    def call(self, *operands: Any, **keywords: Any) -> Fp32PiecesCall:
        """The call that `fp32_pieces` makes, for `explain`."""
        return Fp32PiecesCall(*operands, **keywords)

    def trial(
        self, operation: Fp32PiecesOperation, shape: Fp32PiecesShape, device: str, seed: int
    ) -> Fp32PiecesTrial:
        """Random calls: see trial.py."""
        return Fp32PiecesTrial(operation, shape, device, seed)

    def calls(self, operation: Fp32PiecesOperation, shape: Fp32PiecesShape) -> list[Call[Any, Any]]:
        """The call that is drawn."""
        return [draw(operation, shape, "meta", None)]

    def baselines(self, operation: Fp32PiecesOperation, trial: Fp32PiecesTrial) -> list[Baseline]:
        """The expression in torch, eager and compiled."""
        function = partial(_pieces, operation)
        return eager_and_compiled(function, [(one.x,) for one in trial.sets])


def _pieces(operation: Fp32PiecesOperation, x: torch.Tensor) -> list[torch.Tensor]:
    return [*reference.pieces(x, TORCH[operation.q], operation.count)]


FAMILY = Fp32PiecesRuntime()
