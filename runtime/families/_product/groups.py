"""What calls of all families share whose groups end at offsets that only the device reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from warploom.arguments import require_dtype
from warploom.errors import ProblemError
from warploom.generator.epilogue import GATES as GATE_STEPS
from warploom.generator.epilogue import Gate
from warploom.generator.families._product.groups import MOST_GROUPS
from warploom.runtime.arguments import Arguments
from warploom.runtime.elements import NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.epilogue import ITEMS, BoundEpilogue
from warploom.runtime.families._product.operands import Copy, Operand
from warploom.runtime.families._product.steps.activation import FUNCTIONS
from warploom.runtime.families._product.steps.gate import GATES
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import require_memory, require_one_device, shown

_TENSORS = {
    **{name: name for name in ("bias", "scale_a", "scale_b")},
    "scale_row": "row_scale",
    "residual": "residual",
    "scatter": "scatter",
}
"""Items that have tensors, and what calls have for them, in the order of their declarations."""

_NAMED = ("bias", "residual", "scatter")  # items whose tensors kernels call so
_GATED = tuple(kind for one in GATE_STEPS for kind in one.arguments)
_WORDS = {"activation": (*FUNCTIONS,), **dict.fromkeys(Gate.arguments, GATES)}


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    operands: Mapping[str, Operand]
    copies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyForEach(Copy):
    """A copy of a matrix for each group, also where all are one in memory."""

    def _source(self, operand: torch.Tensor) -> torch.Tensor:
        return operand


def operand_of_groups(b: torch.Tensor, allowed: tuple[str, ...]) -> Operand:
    """B [G, K, N], whose matrix kernels find by its group: an expanded view is copied."""
    groups = b.shape[0]
    if groups < 2 or b.stride(0) or not b.numel():
        return Operand.of(b, allowed, (groups,))
    copy = CopyForEach(allowed[0], (groups,))
    return replace(Operand.of(copy.room(b), allowed[:1], (groups,)), copy=copy)


class GroupedProduct(Arguments[Details, tuple[torch.Tensor]]):
    """A call that multiplies groups of rows of A, or of k, each by a matrix of its own."""

    __slots__ = ()
    outputs = ("d",)
    a: torch.Tensor
    offs: torch.Tensor
    row_scale: torch.Tensor | None
    out: torch.Tensor | None
    out_dtype: torch.dtype | None

    @property
    def by_rows(self) -> bool:
        """Whether groups are of rows of A and D, not of k."""
        return True

    @property
    def groups(self) -> int:
        """How many there are."""
        return self.offs.shape[0]

    @property
    @abstractmethod
    def items(self) -> Sequence[Item]:
        """The epilogue."""

    def with_row_scale(self, listed: Sequence[Item]) -> Sequence[Item]:
        """An epilogue, and the scale of rows behind it."""
        return listed if self.row_scale is None else [*listed, ("scale_row", self.row_scale)]

    def scalars(self, details: Details) -> tuple[float, ...]:
        """The numbers of the epilogue."""
        return ITEMS.numbers(self.items)

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        if self.out_dtype is not None:
            require_dtype("out_dtype", self.out_dtype, NAMES)
        for kind, value, *_ in self.items:
            known = _WORDS.get(kind)
            if known is not None and not (isinstance(value, str) and value in known):
                raise ProblemError(
                    f"{kind} {shown(value)}",
                    rule=f"must be one of {', '.join(known)}",
                    fix="use one of them, or apply it to the result",
                )

    def check_groups(self, matrices: int | None, lengths: bool = False) -> None:
        """Raise ProblemError for tensors on several devices, and for offsets that are not those of
        so many matrices; None where each group is one of k. `lengths` are counts of rows instead.
        """
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        name, what, fix = "offs", "where each group ends", "counts.cumsum(0, dtype=torch.int32)"
        if lengths:
            name, what, fix = "lengths", "how many rows of each batch count", "counts.int()"
        offs = self.offs
        if offs.dtype != torch.int32 or offs.dim() != 1 or not offs.is_contiguous():
            raise ProblemError(
                f"{name} {list(offs.shape)} of {offs.dtype} with strides {list(offs.stride())}",
                rule=f"must be contiguous int32 [G]: {what}",
                fix=f"use {fix}",
            )
        if matrices is not None and matrices != self.groups:
            raise ProblemError(
                f"{matrices} matrices with {name} {list(offs.shape)}",
                rule="must be one for each group",
                fix="pass a length for every batch, 0 where no row counts"
                if lengths
                else "pass an end for every group: of an empty one it is that of the one before",
            )
        if self.groups > MOST_GROUPS:
            raise ProblemError(
                f"{name} {list(offs.shape)}",
                rule=f"must be of at most {MOST_GROUPS} groups, whose ends a CTA keeps in shared "
                "memory",
                fix="call it for some of the groups at a time",
            )

    def bind(self, steps: Sequence[Item], n: int) -> BoundEpilogue:
        """Check an epilogue against products of n columns each, and return its steps.

        A row has one group: what has a value for each row has no dimension of groups, as it would
        have beside batches.
        """
        m, groups, device = self.a.shape[0], self.groups, self.a.get_device()
        for kind, value, *_ in steps if self.by_rows else ():
            if not isinstance(value, torch.Tensor) or value.numel() < 2 or kind == "scatter":
                continue
            name, fix = _TENSORS[kind], "pass one vector for the rows of all groups"
            if kind == "residual":
                shape = (m, n // 2 if any(one[0] in _GATED for one in steps) else n)
                fits, rule = tuple(value.shape) == shape, f"be {[*shape]}, a row for each of a"
                fix = "pass one matrix for the rows of all groups"
            elif kind in ("scale_a", "scale_row"):
                fits, rule = value.numel() == m, f"have {m} elements, one for each row of a"
            else:
                fits = tuple(value.shape) in ((groups, n), (1, n), (n,))
                rule = f"be {[groups, n]} or {[n]}"
                fix = f"use {name}.flatten(0, -2)" if value.dim() > 2 else f"reshape {name}"
                if kind == "scale_b":
                    rule += f", {[groups, 1]} for a scale of each matrix, or block scales of both "
                    rule += f"operands, {[groups, -(-n // 128), -(-self.a.shape[1] // 128)]}"
            if not fits:
                told = f"{name} {list(value.shape)} with {groups} groups"
                raise ProblemError(told, rule=f"must {rule}", fix=fix)
        return epilogue.bind(steps, (groups,), m, n, device, batched=True)

    def steps_addressed(self, steps: Sequence[Item], **others: str) -> tuple[str, ...]:
        """What kernels call the tensors of an epilogue, in the order of the call's arguments: by
        their places among the steps, or as `others` say.
        """
        fields = {
            _TENSORS[item[0]]: f"{item[0] if item[0] in _NAMED else 'scale'}_{index}"
            for index, item in enumerate(steps)
            if item[0] in _TENSORS
        }
        fields |= others
        return tuple(fields[name] for name in _TENSORS.values() if name in fields)

    def results(self, details: Details) -> tuple[torch.Tensor]:
        """D, as it was given, or new."""
        if self.out is not None:
            return (self.out,)
        return (self.a.new_empty(details.shape, dtype=details.dtype),)

    def copied(self, details: Details) -> Self:
        """The same call, with what TMA cannot read copied to where it can."""
        copies: dict[str, Any] = {
            name: one.copy(getattr(self, name))
            for name, one in details.operands.items()
            if one.copy is not None
        }
        return replace(self, **copies)  # type: ignore[type-var]

    def check(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        require_memory([*self.named(), ("out", results[0])])
        refuse_overlap(results[0], self.read(), "do not overlap")

    def ends(self, size: int) -> list[int]:
        """Where groups end in so many rows, read on the host: with a wait where that is on a GPU.

        Raises ProblemError for offsets that decrease or lie outside of what is divided.
        """
        return ends_of("offs", self.offs, size)


def ends_of(name: str, offsets: torch.Tensor, size: int) -> list[int]:
    """Where groups end in so many rows, read on the host: with a wait where that is on a GPU.

    Raises ProblemError for offsets that decrease or lie outside of what is divided.
    """
    found: list[int] = offsets.tolist()
    if any(one < before for before, one in zip([0, *found], [*found, size], strict=True)):
        raise ProblemError(
            f"{name} {shown(found)}",
            rule=f"must not decrease, from 0 on to at most {size}",
            fix="use counts.cumsum(0, dtype=torch.int32)",
        )
    return found


def in_groups(rows: int, offs: torch.Tensor) -> torch.Tensor:
    """Which of so many rows have a group: bool [rows], as the device says.

    The last group ends at the largest offset, since one below the one before it counts as that.
    """
    places = torch.arange(rows, device=offs.device)
    return places < (offs.amax() if offs.numel() else 0)
