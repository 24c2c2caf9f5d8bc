"""Gates: a function of one half of the columns times the other half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast, get_args

import torch

from warploom.arguments import is_finite, is_number
from warploom.errors import ProblemError
from warploom.generator.epilogue import GATES as STEPS
from warploom.generator.epilogue import Function, Gate, GateFunction, GateLayout, SwigluGate
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
    StepT,
    TorchStep,
)
from warploom.runtime.tensors import shown

MULTIPLE = 16
"""Of gate's and up's columns together: kernels load 8 of each in turn."""

SWIGLU_OAI: GateFunction = "swiglu_oai"
ALPHA, LIMIT = 1.702, 7.0
"""Of swiglu_oai, as gpt-oss has it and kernels do that are handed no others."""

GATES: tuple[GateFunction, ...] = get_args(GateFunction)
LAYOUTS: tuple[GateLayout, ...] = get_args(GateLayout)
_KINDS: dict[str, GateLayout] = {
    kind: layout for one in STEPS for kind, layout in zip(one.arguments, LAYOUTS, strict=True)
}
_BETWEEN = " "  # the kind and the function, in what an operator is given


def kind_of(layout: GateLayout) -> str:
    """The kind of an item that gates columns laid out like this."""
    return Gate.arguments[LAYOUTS.index(layout)]


def gate_item(
    function: str | None, layout: GateLayout, alpha: float = ALPHA, limit: float = LIMIT
) -> Item:
    """Return the item of a gate; alpha and limit are swiglu_oai's.

    Raises ProblemError for an alpha or a limit of another function.
    """
    if not has_own_numbers(alpha, limit):
        return (kind_of(layout), function)
    if function != SWIGLU_OAI:
        raise ProblemError(
            f"alpha {shown(alpha)} and limit {shown(limit)} with gate {shown(function)}",
            rule=f"must be left out: they are those of {SWIGLU_OAI}",
            fix=f"pass gate={SWIGLU_OAI!r}",
        )
    return (SwigluGate.arguments[LAYOUTS.index(layout)], alpha, limit)


def has_own_numbers(alpha: object, limit: object) -> bool:
    """Whether the alpha or the limit of a call is another than gpt-oss's.

    Raises ProblemError for what are no numbers.
    """
    for name, value in (("alpha", alpha), ("limit", limit)):
        if not is_number(value):
            raise ProblemError(
                f"gate_{name} {shown(value)} of type {type(value).__name__}",
                rule="must be a number, which the launch hands to the kernel",
                fix="pass a float, such as float(tensor)",
            )
    return (alpha, limit) != (ALPHA, LIMIT)


def gate_options(listed: Sequence[Item]) -> dict[str, Any]:
    """The function of an epilogue's gate, if it has one, and its numbers, as calls have them."""
    for kind, *values in listed:
        if kind in Gate.arguments:
            return {"gate": values[0]}
        if kind in SwigluGate.arguments:
            return {"gate": SWIGLU_OAI, "gate_alpha": values[0], "gate_limit": values[1]}
    return {}


def has_kernel(function: object, alpha: float, limit: float) -> bool:
    """Whether kernels take these numbers of a gate."""
    return function != SWIGLU_OAI or (
        is_finite(alpha) and limit > 0 and (is_finite(limit) or limit == math.inf)
    )


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
    if function == SWIGLU_OAI:
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate)
    return FUNCTIONS[cast("Function", function)](gate)


def factor(function: GateFunction, up: torch.Tensor, limit: float = LIMIT) -> torch.Tensor:
    """Return what the function of the gate is multiplied by; the limit is swiglu_oai's."""
    return up.clamp(-limit, limit) + 1 if function == SWIGLU_OAI else up


class _AnyGate(TorchStep[StepT]):
    """Halves the columns: a function of the gate, times up."""

    def columns(self, n: int) -> int:
        return n // 2

    def function(self, item: Item) -> tuple[GateFunction, float, float]:
        """The function, and the alpha and the limit of swiglu_oai."""
        raise NotImplementedError

    def check_columns(self, item: Item, at: Extents) -> None:
        """Raise ProblemError for columns that kernels cannot halve."""
        if at.n % MULTIPLE:
            raise ProblemError(
                f"{item[0]} of {at.n} columns",
                rule=f"gate and up must have a multiple of {MULTIPLE // 2} columns each",
                fix="pad the weight, or multiply the halves of the result",
            )

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        gate, up = split(x, layout_of(item))
        function, alpha, limit = self.function(item)
        return activated(function, gate, alpha, limit) * factor(function, up, limit)

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        layout, (function, alpha, limit) = layout_of(item), self.function(item)
        gate, up = split(before, layout)
        of_gate, of_up = split(error, layout)
        value, other = (
            activated(function, gate, alpha, limit).abs(),
            factor(function, up, limit).abs(),
        )
        # As of an activation; swiglu_oai's is silu's, of another scale.
        own = 0.0 if function == "relu" else FUNCTION_ERROR
        steep = 8 / max(min(abs(alpha), 1.0), 2**-20)
        moved = STEEPEST * of_gate + own * (value + gate.abs().clamp(max=steep))
        of_factor = of_up + ROUNDOFF * other * (function == SWIGLU_OAI)
        return moved * (other + of_factor) + value * of_factor + ROUNDOFF * after.abs()


class TorchGate(_AnyGate[Gate]):
    """A gate by its name."""

    step = Gate
    example = '("gate", "silu")'

    def function(self, item: Item) -> tuple[GateFunction, float, float]:
        return item[1], ALPHA, LIMIT

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Gate, None]:
        kind, function = item
        if function not in GATES or not isinstance(function, str):
            raise ProblemError(
                f"{kind} {shown(function)}",
                rule=f"must be one of {', '.join(GATES)}",
                fix="use one of them, or multiply the halves of the result",
            )
        self.check_columns(item, at)
        return Gate(cast("GateFunction", function), _KINDS[kind]), None

    def sample(self, step: Gate, draws: Draws, at: Extents) -> Item:
        return gate_item(step.function, step.layout)

    def flatten(self, item: Item, into: Flat) -> None:
        into.words.append(f"{item[0]}{_BETWEEN}{item[1]}")

    def owns(self, word: str) -> bool:
        return word.split(_BETWEEN)[0] in self.step.arguments

    def unflatten(self, word: str, given: Given) -> Item:
        kind, function = word.split(_BETWEEN, 1)
        return (kind, function)


class TorchSwigluGate(_AnyGate[SwigluGate]):
    """swiglu_oai of an alpha and a limit, which are numbers of the call."""

    step = SwigluGate
    value = "alpha"
    number = "limit"
    example = '("swiglu_gate", 1.702, 7.0)'

    def function(self, item: Item) -> tuple[GateFunction, float, float]:
        return SWIGLU_OAI, float(item[1]), float(item[2])

    def bind(self, item: Item, at: Extents, device: int) -> tuple[SwigluGate, None]:
        self.check_finite(item)
        self.check_columns(item, at)
        return SwigluGate(_KINDS[item[0]]), None

    def check_finite(self, item: Item) -> None:
        kind, alpha, limit = item
        if not (is_number(alpha) and is_number(limit) and has_kernel(SWIGLU_OAI, alpha, limit)):
            raise ProblemError(
                f"{kind} with alpha {shown(alpha)} and limit {shown(limit)}",
                rule="must have two numbers, a finite alpha and a limit above 0",
                fix="pass those of the model, as 1.702 and 7.0",
            )

    def sample(self, step: SwigluGate, draws: Draws, at: Extents) -> Item:
        return gate_item(SWIGLU_OAI, step.layout, 0.75, 1.25)  # past which many samples are

    def flatten(self, item: Item, into: Flat) -> None:
        into.words.append(item[0])
        into.numbers.extend(map(float, item[1:]))

    def unflatten(self, word: str, given: Given) -> Item:
        return (word, next(given.numbers), next(given.numbers))
