"""Stochastic rounding of D, by random numbers that are a function of a state and of the place."""

from __future__ import annotations

import torch

from warploom import errors
from warploom.generator.epilogue import StochasticRounding
from warploom.runtime import rounding
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Draws, Item, TorchStep
from warploom.runtime.tensors import shown


class TorchStochasticRounding(TorchStep[StochasticRounding]):
    """Passes values on, whose mean D has; gradients too."""

    step = StochasticRounding
    example = '("stochastic_rounding", state)'

    def bind(self, item: Item, at: Extents, device: int) -> tuple[StochasticRounding, torch.Tensor]:
        kind, state = item
        if not isinstance(state, torch.Tensor):
            raise errors.ProblemError(
                f"{kind} {shown(state)}", rule="must be a tensor", fix="pass a torch tensor"
            )
        if state.get_device() != device:
            raise errors.ProblemError(
                f"{kind} on {state.device}",
                rule="must be on the device of a and b",
                fix="move it there",
            )
        rounding.check_state(state)
        return StochasticRounding(), state

    def rounded(self, x: torch.Tensor, item: Item, dtype: torch.dtype) -> torch.Tensor:
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).to(torch.float32)
        return rounding.rounded_in_patches(rows, item[1], dtype).reshape(x.shape)

    def sample(self, step: StochasticRounding, draws: Draws, at: Extents) -> Item:
        return ("stochastic_rounding", torch.arange(1, 3, device=draws.device))
