"""The gradient of a gate: that of gate and up; and their product, which is computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import GateFunction, GateGradient, GateLayout
from warploom.generator.step import Reads
from warploom.runtime.families._activation import gradient
from warploom.runtime.families._product.steps.activation import FUNCTION_ERROR
from warploom.runtime.families._product.steps.gate import (
    ALPHA,
    LIMIT,
    MULTIPLE,
    activated,
    factor,
    split,
)
from warploom.runtime.families._product.steps.operand import Extents, require_each
from warploom.runtime.families._product.steps.step import ROUNDOFF, Draws, Item, TorchStep
from warploom.runtime.tensors import shown

_KIND = "_gate_gradient"
_INTERLEAVED = "_interleaved"
_ELEMENTS: dict[torch.dtype, Literal["fp16", "bf16"]] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


def gradient_kind(function: GateFunction, layout: GateLayout) -> str:
    """The kind of an item that takes a gradient past a gate."""
    return f"{function}{_KIND}{_INTERLEAVED if layout == 'interleaved' else ''}"


def function_of(item: Item) -> tuple[GateFunction, GateLayout]:
    """The function of the gate that an item is of, and the layout of its columns."""
    function, _, layout = item[0].partition(_KIND)
    return cast("GateFunction", function), "interleaved" if layout else "halves"


def slope(function: GateFunction, gate: torch.Tensor) -> torch.Tensor:
    """The derivative of a gate's function, in the precision of `gate`."""
    if function == "swiglu_oai":  # as silu's, of another scale
        return gradient.slope("silu", ALPHA * gate) * (gate <= LIMIT)
    return gradient.slope(function, gate)


def factor_slope(function: GateFunction, up: torch.Tensor) -> torch.Tensor:
    """The derivative of what a gate's function is multiplied by."""
    return (up.abs() <= LIMIT).to(up.dtype) if function == "swiglu_oai" else torch.ones_like(up)


def joined(gate: torch.Tensor, up: torch.Tensor, layout: GateLayout) -> torch.Tensor:
    """One tensor of the columns of gate and up: what `split` takes apart."""
    if layout == "interleaved":
        return torch.stack((gate, up), -1).flatten(-2)
    return torch.cat((gate, up), -1)


def of_both(
    dh: torch.Tensor, z: torch.Tensor, function: GateFunction, layout: GateLayout
) -> torch.Tensor:
    """The gradient of z = gate and up [.., 2n], where that of the gate's result is dh [.., n]."""
    gate, up = split(z, layout)
    of_gate = dh * factor(function, up) * slope(function, gate)
    of_up = dh * activated(function, gate) * factor_slope(function, up)
    return joined(of_gate, of_up, layout)


class TorchGateGradient(TorchStep[GateGradient]):
    """Takes a gradient past a gate, to a tensor of its own; the result of the gate passes on."""

    step = GateGradient
    number = "dz"
    example = '("silu_gate_gradient", z, dz)'
    overwrites = True
    no_gradient = "it is of a gradient itself"

    def reads(self, item: Item) -> Reads:
        return "fragment"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[GateGradient, torch.Tensor]:
        kind, z, dz = item
        if at.n % (MULTIPLE // 2):
            raise ProblemError(
                f"{kind} of {at.n} columns",
                rule=f"must be of a multiple of {MULTIPLE // 2} columns, as gates are",
                fix="pad the weight",
            )
        both = replace(at, n=2 * at.n)
        value = self.tensor(item, both, device)
        require_each(item, "fragment", value, both)
        if z.dtype not in _ELEMENTS:
            raise ProblemError(f"{kind} of {z.dtype}", rule="must be fp16 or bf16", fix="convert z")
        if not isinstance(dz, torch.Tensor):
            raise ProblemError(
                f"dz of {kind}, {shown(dz)}", rule="must be a tensor", fix="pass a torch tensor"
            )
        like = (dz.shape, dz.stride(), dz.dtype, dz.device)
        if like != (z.shape, z.stride(), z.dtype, z.device):
            raise ProblemError(
                f"dz of {kind}, {list(dz.shape)} {dz.dtype} with strides {list(dz.stride())} on "
                f"{dz.device}",
                rule=f"must be as z, {list(z.shape)} {z.dtype} with strides {list(z.stride())} on "
                f"{z.device}",
                fix="make it by torch.empty_like(z)",
            )
        function, layout = function_of(item)
        return GateGradient(function, _ELEMENTS[z.dtype], layout), value

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        function, layout = function_of(item)
        gate, up = split(self._z(x, item), layout)
        return activated(function, gate) * factor(function, up)

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        function, layout = function_of(item)
        gate, up = split(self._z(before, item), layout)
        own = _function_error(function, gate) * factor(function, up).abs()
        return own + 2 * ROUNDOFF * after.abs()

    def write(self, x: torch.Tensor, item: Item) -> None:
        item[-1].copy_(of_both(x, self._z(x, item), *function_of(item)).reshape(item[-1].shape))

    def written_bound(
        self, x: torch.Tensor, error: torch.Tensor, item: Item
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What dz is in the precision of x, which is off by `error`, and how far off it may be."""
        function, layout = function_of(item)
        z = self._z(x, item)
        gate, up = split(z, layout)
        exact = of_both(x, z, function, layout)
        other, steep = factor(function, up).abs(), slope(function, gate).abs()
        value = activated(function, gate).abs()
        # Of swiglu_oai what passes the limit is the same, and within it silu's holds.
        of_slope = gradient.slope_error(
            "silu" if function == "swiglu_oai" else function, gate, torch.zeros_like(gate)
        )
        off_gate = error * other * steep + x.abs() * other * of_slope
        off_up = (error * value + x.abs() * _function_error(function, gate)) * factor_slope(
            function, up
        )
        return exact, joined(off_gate, off_up, layout) + 4 * ROUNDOFF * exact.abs()

    def sample(self, step: GateGradient, draws: Draws, at: Extents) -> Item:
        shape = (*at.batches, at.m, 2 * at.n)
        z, dz = (draws.values(step.element, shape) for _ in range(2))
        return (gradient_kind(step.function, step.layout), z, dz)

    def _z(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        """Gate and up in x's precision and batches."""
        return cast("torch.Tensor", item[1]).to(x.dtype).reshape(*x.shape[:-1], 2 * x.shape[-1])


def _function_error(function: GateFunction, gate: torch.Tensor) -> torch.Tensor:
    """How far a kernel's value of a gate's function may be off, its argument being exact."""
    own = 0.0 if function == "relu" else FUNCTION_ERROR
    return own * (activated(function, gate).abs() + gate.abs().clamp(max=8))
