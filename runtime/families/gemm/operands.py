"""The operands of a GEMM call where they lie: read in place, copied, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from warploom.errors import ProblemError
from warploom.generator.elements import element
from warploom.generator.families.gemm import Batches, GemmOperation
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import PITCH_BYTES
from warploom.runtime.elements import name_of
from warploom.runtime.families.gemm.batches import batches, stacked
from warploom.runtime.families.gemm.placement import (
    Placement,
    padded_copy,
    padded_room,
    place,
)
from warploom.runtime.families.gemm.steps import step_of
from warploom.runtime.families.gemm.steps.step import Item
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


def layouts(a: torch.Tensor, spec: KernelSpec | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layouts in which A and B may be read in place, the one that a copy takes first."""
    if spec is not None:
        operation = cast("GemmOperation", spec.operation)
        return (operation.layout_a,), (operation.layout_b,)
    if element(name_of(a.dtype, "a")).bits == 16:
        return ("row", "col"), ("col", "row")
    return ("row",), ("col",)


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


def refuse_grad(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> None:
    """Raise ProblemError when autograd expects a graph that these kernels do not build."""
    found = requiring_grad(a, b, out, listed)
    if found is not None:
        raise differentiated(found.shape)


def requiring_grad(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> torch.Tensor | None:
    """Return a tensor of a call that requires grad. Every call asks, so it is asked shortly."""
    if a.requires_grad:
        return a
    if b.requires_grad:
        return b
    if out is not None and out.requires_grad:
        return out
    for item in listed:
        if isinstance(item[1], torch.Tensor) and item[1].requires_grad:
            return item[1]
    return None


def differentiated(shape: Sequence[int]) -> ProblemError:
    """The error of a call whose operand, of this shape, requires grad."""
    return ProblemError(
        f"a tensor of shape {list(shape)} that requires grad",
        rule="warploom.gemm is not differentiable",
        fix="call it under torch.no_grad(), or on .detach()ed tensors",
    )


def named(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> list[tuple[str, object]]:
    """The tensors of a call, by the names that messages have for them."""
    read = [(item[0], item[1]) for item in listed if isinstance(item[1], torch.Tensor)]
    return [("a", a), ("b", b), ("out", out), *read]


def check_apart(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item]
) -> None:
    """Raise ProblemError when `out` shares memory with an operand, unless it is the residual; or
    when what a step fills does, with anything.
    """
    read, stored = [("a", a), ("b", b)], list[tuple[str, torch.Tensor]]()
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
