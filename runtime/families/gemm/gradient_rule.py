"""How a kind of call is differentiated: what is kept for that, and which way the gradient goes.

Of D = after(activation(before(A B))), where the steps before and after are linear, the gradient of
the products is dD times the scales and the activation's derivative. A gate is an activation here,
of two columns for each of D's. Any other order of steps is differentiated by torch, step by step,
on products that are computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

import torch

from warploom.generator.epilogue import (
    MOST_STEPS,
    Activation,
    Bias,
    Gate,
    Residual,
    Scale,
    StochasticRounding,
)
from warploom.generator.families.gemm import Accumulation
from warploom.runtime.families._product.steps import OUTPUTS, step_of
from warploom.runtime.families._product.steps.step import Item

Preactivation = Literal["save", "recompute"]
Way = Literal["linear", "output", "save", "recompute", "composite"]
"""How a gradient passes the activation: it meets none (linear); the result tells its slope
(output); what the activation was given is kept (save) or computed again (recompute); or torch
differentiates all steps (composite).
"""

Place = int  # of a tensor among a, b and those of the items

A, B = 0, 1  # the places of the operands
VECTORS = ("row", "column")
_ACTIVATIONS = frozenset((*Activation.arguments, *Gate.arguments))
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class GradientOptions(NamedTuple):
    """How the gradients of a call are computed; see `warploom.gemm`."""

    accumulation: Accumulation
    gradient_dtype: torch.dtype
    accumulate_into: torch.Tensor | None


class Metadata(NamedTuple):
    """What a tensor's gradient has of it, which may not be kept itself: shape, type and layout."""

    shape: Sequence[int]
    dtype: torch.dtype
    column_major: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Metadata:
        """That of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.dim() > 1 and is_column_major(tensor))


@dataclass(frozen=True, slots=True)
class Rule:
    """How calls of one kind are differentiated in some of their tensors.

    needed      which of a, b and the items' tensors, by their places, have a gradient
    way         how the gradient passes the activation; see `Way`
    kept        the places of the tensors that are kept for that
    items       the epilogue without its outputs; Place stands for a tensor, None for a number
    metadata    of the tensors, by place
    numbered    whether any item has a number
    """

    needed: tuple[bool, ...]
    way: Way
    kept: tuple[Place, ...]
    items: tuple[Item, ...]
    metadata: tuple[Metadata, ...]
    numbered: bool

    def listed(
        self, tensors: Sequence[torch.Tensor | None], numbers: Sequence[object]
    ) -> list[Item]:
        """The items of a call, of its tensors by place and its `numbers`."""
        if self.numbered:
            given = iter(numbers)
            return [tuple(_filled(item, tensors, given)) for item in self.items]
        return [(kind, tensors[one] if isinstance(one, Place) else one) for kind, one in self.items]


def rule(
    tensors: Sequence[torch.Tensor],
    listed: Sequence[Item],
    needed: tuple[bool, ...],
    way: Way,
) -> Rule:
    """How a call of these items and `tensors_of` it is differentiated in those `needed`."""
    places = count(B + 1)
    items = tuple(tuple(_emptied(item, places)) for item in read_by(listed))
    kept: set[Place] = set(range(len(needed)))
    if way != "composite":  # each operand for the other's gradient
        kept = {other for place, other in ((A, B), (B, A)) if needed[place]}
        before = activation_at(items) if way == "recompute" else 0
        kept |= {A, B} if way == "recompute" else set()
        for index, item in enumerate(items):
            if isinstance(item[1], Place) and (index < before or step_of(item).step is Scale):
                kept.add(item[1])
    return Rule(
        needed=needed,
        way=way,
        kept=tuple(sorted(kept)),
        items=items,
        metadata=tuple(map(Metadata.of, tensors)),
        numbered=any(None in item for item in items),
    )


def way_of(
    listed: Sequence[Item],
    needed: Sequence[bool],
    *,
    preactivation: Preactivation,
    stored: bool,
) -> Way:
    """The way of a call, whose result is `stored` as numbers that tell the sign of relu's.

    Compilers trace this.
    """
    items = read_by(listed)
    first = activation_at(items)
    place = B
    passed = wanted = gated = False  # by a gradient: the activation, and a bias or a residual
    inner = needed[A] or needed[B]
    for index, item in enumerate(items):
        kind, needs = step_of(item).step, False
        if isinstance(item[1], torch.Tensor):
            place += 1
            needs = needed[place]
        if kind is Scale:
            reads = step_of(item).reads(item)
            if needs or (wanted and reads in VECTORS) or (gated and reads == "column"):
                return "composite"
        elif kind is Activation or kind is Gate:
            if passed:
                return "composite"
            passed, wanted, gated = inner, wanted and inner, kind is Gate
        elif kind is Bias or kind is Residual:
            wanted = wanted or needs
            inner = inner or (needs and index < first)
        elif kind is not StochasticRounding:  # whose gradient passes straight through
            return "composite"
    if not passed:
        return "linear"
    if items[first] == ("activation", "relu") and stored and first == len(items) - 1:
        return "output"
    kinds = [item[0] for item in listed]
    if preactivation == "save" and len(kinds) < MOST_STEPS and "preactivation" not in kinds:
        return "save"
    return "recompute" if first + 2 <= MOST_STEPS else "composite"  # slope and sums are steps


def read_by(listed: Sequence[Item]) -> list[Item]:
    """The items that are no outputs."""
    return [item for item in listed if item[0] not in OUTPUTS]


def activation_at(items: Sequence[Item]) -> int:
    """The place of the first activation or gate; past the last where there is none."""
    for index, item in enumerate(items):
        if item[0] in _ACTIVATIONS:
            return index
    return len(items)


def _emptied(item: Item, places: Iterator[Place]) -> Iterator[object]:
    for value in item:
        if isinstance(value, torch.Tensor):
            yield next(places)
        else:
            yield value if isinstance(value, str) else None


def _filled(
    item: Item, tensors: Sequence[torch.Tensor | None], numbers: Iterator[object]
) -> Iterator[object]:
    for value in item:
        if isinstance(value, Place):
            yield tensors[value]
        else:
            yield next(numbers) if value is None else value


def tensors_of(a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item]) -> list[torch.Tensor]:
    """What a call reads, by place: a, b and the tensors of its items, without their outputs."""
    read = [item[1] for item in read_by(listed)]
    return [a, b, *[value for value in read if isinstance(value, torch.Tensor)]]


def reads_of(listed: Sequence[Item]) -> list[int]:
    """Which items have a tensor that is read, and may have a gradient, in order."""
    return [
        index
        for index, item in enumerate(listed)
        if isinstance(item[1], torch.Tensor)
        and not step_of(item).step.auxiliary
        and not step_of(item).no_gradient
    ]


def numbers_of(listed: Sequence[Item]) -> tuple[float, ...]:
    """The numbers of a call's items, in order, without those of outputs."""
    return tuple(
        value
        for item in read_by(listed)
        for value in item[1:]
        if not isinstance(value, torch.Tensor | str)
    )


def kept_type(dtype: torch.dtype, operands: torch.dtype) -> torch.dtype:
    """The type in which what an activation is given is kept: of 16 bits, the result's if it is."""
    for one in (dtype, operands):
        if one in (torch.float16, torch.bfloat16):
            return one
    return torch.bfloat16


def storing_items(listed: Sequence[Item], z: torch.Tensor) -> list[Item]:
    """The items of a call that also stores what its activation is given."""
    at = activation_at(listed)
    return [*listed[:at], ("preactivation", z), *listed[at:]]


def is_column_major(matrix: torch.Tensor) -> bool:
    """True for matrices whose columns are contiguous and whose rows are not."""
    return matrix.stride(-1) != 1 and matrix.stride(-2) == 1
