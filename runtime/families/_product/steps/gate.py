"""Gates: a function of one half of the columns times the other half."""

from __future__ import annotations

from typing import cast, get_args

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import Gate, GateFunction, GateLayout
from warploom.runtime.families._product.steps.activation import (
    FUNCTION_ERROR,
    FUNCTIONS,
    STEEPEST,
)
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import (
    ROUNDOFF,
    Draws,
    Flat,
    Given,
    Item,
    TorchStep,
)
from warploom.runtime.tensors import shown

MULTIPLE = 16
"""Of gate's and up's columns together: kernels load 8 of each in turn."""

SWIGLU_OAI = "swiglu_oai"
ALPHA, LIMIT = 1.702, 7.0
"""Of swiglu_oai, as gpt-oss has it and kernels do."""

GATES: tuple[GateFunction, ...] = get_args(GateFunction)
LAYOUTS: tuple[GateLayout, ...] = get_args(GateLayout)
_KINDS: dict[str, GateLayout] = {"gate": "halves", "gate_interleaved": "interleaved"}
_BETWEEN = " "  # the kind and the function, in what an operator is given


def kind_of(layout: GateLayout) -> str:
    """The kind of an item that gates columns laid out like this."""
    return next(kind for kind, one in _KINDS.items() if one == layout)


def layout_of(item: Item) -> GateLayout:
    """How the columns of gate and up are laid out that an item gates."""
    return _KINDS[item[0]]


def split(x: torch.Tensor, layout: GateLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the gate's columns and up's."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    n = x.shape[-1] // 2
    return x[..., :n], x[..., n:]


def activated(
    function: GateFunction, gate: torch.Tensor, alpha: float = ALPHA, limit: float = LIMIT
) -> torch.Tensor:
    """Return the function of the gate; alpha and limit are swiglu_oai's."""
    if function == "swiglu_oai":
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate)
    return FUNCTIONS[function](gate)


def factor(function: GateFunction, up: torch.Tensor, limit: float = LIMIT) -> torch.Tensor:
    """Return what the function of the gate is multiplied by; the limit is swiglu_oai's."""
    return up.clamp(-limit, limit) + 1 if function == "swiglu_oai" else up


class TorchGate(TorchStep[Gate]):
    """Halves the columns: a function of the gate, times up."""

    step = Gate
    example = '("gate", "silu")'

    def columns(self, n: int) -> int:
        return n // 2

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Gate, None]:
        kind, function = item
        if function not in GATES or not isinstance(function, str):
            raise ProblemError(
                f"{kind} {shown(function)}",
                rule=f"must be one of {', '.join(GATES)}",
                fix="use one of them, or multiply the halves of the result",
            )
        if at.n % MULTIPLE:
            raise ProblemError(
                f"{kind} of {at.n} columns",
                rule=f"gate and up must have a multiple of {MULTIPLE // 2} columns each",
                fix="pad the weight, or multiply the halves of the result",
            )
        return Gate(cast("GateFunction", function), _KINDS[kind]), None

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        gate, up = split(x, layout_of(item))
        return activated(item[1], gate) * factor(item[1], up)

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        layout, function = layout_of(item), cast("GateFunction", item[1])
        gate, up = split(before, layout)
        of_gate, of_up = split(error, layout)
        value, other = activated(function, gate).abs(), factor(function, up).abs()
        # As of an activation; swiglu_oai's is silu's, of another scale.
        own = 0.0 if function == "relu" else FUNCTION_ERROR
        moved = STEEPEST * of_gate + own * (value + gate.abs().clamp(max=8))
        of_factor = of_up + ROUNDOFF * other * (function == "swiglu_oai")
        return moved * (other + of_factor) + value * of_factor + ROUNDOFF * after.abs()

    def sample(self, step: Gate, draws: Draws, at: Extents) -> Item:
        return (kind_of(step.layout), step.function)

    def flatten(self, item: Item, into: Flat) -> None:
        into.words.append(f"{item[0]}{_BETWEEN}{item[1]}")

    def owns(self, word: str) -> bool:
        return word.split(_BETWEEN)[0] in _KINDS

    def unflatten(self, word: str, given: Given) -> Item:
        kind, function = word.split(_BETWEEN, 1)
        return (kind, function)
