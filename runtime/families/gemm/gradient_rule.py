"""How a kind of call is differentiated: what is kept for that, and which way the gradient goes.

Of D = after(activation(before(A B))), where the steps before and after are linear, the gradient of
the products is dD times the scales and the activation's derivative. Any other order of steps is
differentiated by torch, step by step, on products that are computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

import torch

from warploom.generator.epilogue import Activation, Bias, Residual, Scale
from warploom.generator.families.gemm import Accumulation
from warploom.runtime.families.gemm.steps import step_of
from warploom.runtime.families.gemm.steps.step import Item

Preactivation = Literal["save", "recompute"]
Way = Literal["linear", "composite"]
Place = int  # of a tensor among a, b and those of the items

A, B = 0, 1  # the places of the operands
VECTORS = ("row", "column")


class GradientOptions(NamedTuple):
    """How the gradients of a call are computed; see `warploom.gemm`."""

    accumulation: Accumulation
    gradient_dtype: torch.dtype
    accumulate_into: torch.Tensor | None


class Lie(NamedTuple):
    """A tensor as its gradient is to be, though it may not be kept itself."""

    shape: Sequence[int]
    dtype: torch.dtype
    turned: bool  # column by column in memory

    @classmethod
    def of(cls, operand: torch.Tensor) -> Lie:
        """How it lies."""
        return cls(operand.shape, operand.dtype, turned(operand))


@dataclass(frozen=True, slots=True)
class Rule:
    """How calls of one kind are differentiated in some of their tensors.

    needed   which of a, b and the items' tensors, by their places, have a gradient
    way      how dD becomes the gradient of the products and of what the items read
    kept     the places of the tensors that are kept for that
    items    the epilogue without its outputs; Place stands for a tensor, None for a number
    lies     how the tensors lie, by place
    """

    needed: tuple[bool, ...]
    way: Way
    kept: tuple[Place, ...]
    items: tuple[Item, ...]
    lies: tuple[Lie, ...]

    def listed(
        self, tensors: Sequence[torch.Tensor | None], numbers: Sequence[object]
    ) -> list[Item]:
        """The items of a call, of its tensors by place and its `numbers`."""
        given = iter(numbers)
        return [tuple(_filled(item, tensors, given)) for item in self.items]


def rule(tensors: Sequence[torch.Tensor], listed: Sequence[Item], needed: tuple[bool, ...]) -> Rule:
    """How a call of these items and `tensors_of` it is differentiated in those `needed`."""
    read = [item for item in listed if not step_of(item).step.auxiliary]
    places = count(B + 1)
    items = tuple(tuple(_emptied(item, places)) for item in read)
    kinds = [step_of(item).step for item in read]
    first = kinds.index(Activation) if Activation in kinds else len(kinds)
    before = [item[1] for item in items[:first] if isinstance(item[1], Place)]
    inner = any(needed[place] for place in (A, B, *before))
    way: Way = "linear" if _is_linear(read, items, needed, inner=inner) else "composite"
    kept: set[Place] = set(range(len(needed)))
    if way == "linear":  # each operand for the other's gradient
        kept = {other for place, other in ((A, B), (B, A)) if needed[place]}
    for item, kind in zip(items, kinds, strict=True):
        if kind is Scale and isinstance(item[1], Place):
            kept.add(item[1])
    return Rule(needed, way, tuple(sorted(kept)), items, tuple(map(Lie.of, tensors)))


def _is_linear(
    read: Sequence[Item], items: Sequence[Item], needed: Sequence[bool], *, inner: bool
) -> bool:
    """True where no gradient needs the values that pass, and scales can be left to the products."""
    wanted = False  # by a bias or a residual
    for item, asked in zip(read, items, strict=True):
        kind, of_tensor = step_of(item).step, isinstance(asked[1], Place)
        if kind is Activation:
            if inner:
                return False
            wanted = False
        elif kind is Scale:
            vector = step_of(item).reads(item) in VECTORS
            if (of_tensor and needed[asked[1]]) or (vector and wanted):
                return False
        elif kind in (Bias, Residual):
            wanted |= needed[asked[1]]
        else:
            return False
    return True


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
    read = (item[1] for item in listed if not step_of(item).step.auxiliary)
    return [a, b, *(value for value in read if isinstance(value, torch.Tensor))]


def numbers_of(listed: Sequence[Item]) -> tuple[float, ...]:
    """The numbers of a call's items, in order, without those of outputs."""
    return tuple(
        value
        for item in listed
        if not step_of(item).step.auxiliary
        for value in item[1:]
        if not isinstance(value, torch.Tensor | str)
    )


def turned(matrix: torch.Tensor) -> bool:
    """True for one that lies column by column in memory."""
    return matrix.stride(-1) != 1 and matrix.stride(-2) == 1
