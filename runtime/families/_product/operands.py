"""Operands of products where they lie: read in place, copied, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from warploom.errors import ProblemError
from warploom.generator.families._product import Batches
from warploom.generator.tensor_maps import PITCH_BYTES
from warploom.runtime.families._product.batches import batches, stacked
from warploom.runtime.families._product.placement import (
    Placement,
    padded_copy,
    padded_room,
    place,
)
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.operands import refuse_overlap

Placed = tuple[Placement, Batches]


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of an operand that TMA can read: to a layout, of all its batches where D has some."""

    layout: str
    batches: tuple[int, ...] | None

    def __call__(self, operand: torch.Tensor) -> torch.Tensor:
        """Return the copy; it is counted."""
        return padded_copy(self._source(operand), self.layout)

    def room(self, operand: torch.Tensor) -> torch.Tensor:
        """Return a tensor without memory that lies as the copy will."""
        return padded_room(self._source(operand), self.layout, "meta")

    def _source(self, operand: torch.Tensor) -> torch.Tensor:
        return matrix(operand) if self.batches is None else stacked(operand, self.batches)


def place_operand(
    operand: torch.Tensor, allowed: tuple[str, ...], shared: tuple[int, ...] | None
) -> tuple[Placement, Batches, Copy | None]:
    """Where TMA reads A or B: in place if it can, else in a copy in the first allowed layout.

    `shared` are the batches of D; None where it has none.
    """
    if found := _in_place(operand, allowed, shared):
        return *found, None
    copy = Copy(allowed[0], shared)
    return *cast("Placed", _in_place(copy.room(operand), allowed[:1], shared)), copy


def _in_place(
    operand: torch.Tensor, allowed: tuple[str, ...], shared: tuple[int, ...] | None
) -> Placed | None:
    first = operand
    if operand.dim() > 2 and shared is None:
        try:
            first = operand.view(operand.shape[:-1].numel(), operand.shape[-1])
        except RuntimeError:  # its rows are not one pitch apart
            return None
    elif operand.dim() > 2 and operand.numel():
        first = operand[(0,) * (operand.dim() - 2)]
    at = place(first, allowed) if first.dim() == 2 else Placement(allowed[0], operand.shape[-1])
    lie = Batches() if shared is None else batches(operand, shared)
    if at is None or lie is None or lie.pitch * operand.element_size() % PITCH_BYTES:
        return None
    return at, lie


def unseen(name: str) -> ProblemError:
    """The error of a call with such an output."""
    if name == "out":
        return ProblemError(
            "out with a tensor that requires grad",
            rule="autograd differentiates results that it has not seen before",
            fix="leave out=None, or call under torch.no_grad()",
        )
    return ProblemError(
        f"{name} that requires grad",
        rule="must not: it is an output of its step, which autograd does not see",
        fix=f"pass {name}.detach(), or a tensor of its own",
    )


def check_apart(
    out: torch.Tensor, operands: Sequence[tuple[str, torch.Tensor]], listed: Sequence[Item]
) -> None:
    """Raise ProblemError when `out` shares memory with an operand, unless it is the residual; or
    when what a step fills does, with anything.
    """
    read, stored = [*operands], list[tuple[str, torch.Tensor]]()
    for item in listed:
        if isinstance(item[1], torch.Tensor):
            step = step_of(item)
            beside = stored if step.overwrites else read
            beside += [item[:2]] * (not (step.in_place and _same(item[1], out)))
    refuse_overlap(out, (*read, *stored), "do not overlap; out may be exactly the residual")
    for index, (kind, value) in enumerate(stored):
        refuse_overlap(value, (*read, *stored[:index]), "do not overlap: one is stored", kind)


def _same(operand: torch.Tensor, out: torch.Tensor) -> bool:
    """True when each element of an operand is read where the result's is written."""
    return (
        operand.data_ptr() == out.data_ptr()
        and operand.dtype == out.dtype
        and operand.numel() == out.numel()
        and (
            (operand.shape, operand.stride()) == (out.shape, out.stride())
            or (operand.is_contiguous() and out.is_contiguous())
        )
    )


def matrix(a: torch.Tensor) -> torch.Tensor:
    """Return A [.., M, K] as one matrix; a copy where its strides do not allow a view."""
    return a if a.dim() == 2 else a.flatten(0, -2)
