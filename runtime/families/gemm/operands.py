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
from warploom.runtime.families.gemm.steps import OUTPUTS, step_of
from warploom.runtime.families.gemm.steps.step import Item
from warploom.runtime.operands import refuse_overlap, refuse_repeated
from warploom.runtime.tensors import shown

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
    """Raise ProblemError where a call would write what autograd is to know of."""
    name = written_unseen(a, b, out, listed)
    if name is not None:
        raise unseen(name)


def written_unseen(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> str | None:
    """Return the name of what a call would write and autograd is to know of."""
    if out is not None and requiring_grad(a, b, out, listed) is not None:
        return "out"
    for item in listed:
        if item[0] in OUTPUTS and item[1].requires_grad:
            return str(item[0])
    return None


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


def check_gradient_options(
    b: torch.Tensor,
    preactivation: object,
    accumulate_into: torch.Tensor | None,
    gradient_dtype: torch.dtype | None,
) -> None:
    """Raise ProblemError for what gradients cannot be computed by, or added to."""
    if preactivation not in ("save", "recompute"):
        raise ProblemError(
            f"preactivation {shown(preactivation)}",
            rule="must be save or recompute",
            fix="leave it out: what the activation is given is then kept for the backward pass",
        )
    if gradient_dtype not in (None, torch.bfloat16, torch.float8_e5m2):
        raise ProblemError(
            f"gradient_dtype {shown(gradient_dtype)}",
            rule="must be torch.bfloat16 or torch.float8_e5m2",
            fix="leave it out for bf16; operands of 16 bits are multiplied in their own type",
        )
    if accumulate_into is not None:
        _check_accumulate_into(b, accumulate_into)


def _check_accumulate_into(b: torch.Tensor, into: torch.Tensor) -> None:
    if not isinstance(into, torch.Tensor) or into.dtype != torch.float32:
        told = into.dtype if isinstance(into, torch.Tensor) else shown(into)
        raise ProblemError(
            f"accumulate_into of {told}", rule="must be an fp32 tensor", fix="use .float()"
        )
    if into.shape != b.shape or into.device != b.device:
        raise ProblemError(
            f"accumulate_into {list(into.shape)} on {into.device}",
            rule=f"must be as b, {list(b.shape)} on {b.device}",
            fix="a weight [N, K] that is passed as b by .t() has its sums passed by .t() too",
        )
    if into.requires_grad:
        raise ProblemError(
            f"accumulate_into {list(into.shape)} that requires grad",
            rule="must not: gradients are added to it in place",
            fix="pass accumulate_into.detach()",
        )
    if torch.is_grad_enabled() and not b.requires_grad:
        raise ProblemError(
            f"accumulate_into beside b {list(b.shape)} that does not require grad",
            rule="must be of a b whose gradient is wanted",
            fix="leave it out, or call under torch.no_grad()",
        )
    refuse_repeated("accumulate_into", into)


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
