"""The epilogue of a call: from keywords, or a list in any order, to steps and their operands.

What an item may be is said in steps/: here is what holds of all, whatever they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypedDict, cast

import torch

from warploom.arguments import require_number
from warploom.errors import ProblemError
from warploom.generator.epilogue import Activation, EpilogueStep, Gate, GateLayout
from warploom.generator.parameters import Kind
from warploom.runtime.arguments import Compound
from warploom.runtime.families._product.steps import (
    KINDS,
    LOADING,
    OUTPUTS,
    flatten,
    operand,
    step_of,
    unflatten,
)
from warploom.runtime.families._product.steps.gate import (
    ALPHA,
    LAYOUTS,
    LIMIT,
    gate_item,
    has_own_numbers,
)
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.scatter import index_of
from warploom.runtime.families._product.steps.step import Given
from warploom.runtime.families._product.steps.step import Item as Item
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.rounding import check_rounding
from warploom.runtime.tensors import shown


class Keywords(TypedDict, total=False):
    """The keywords of a call that make its epilogue (see `warploom.gemm`)."""

    scale_a: float | torch.Tensor | None
    scale_b: float | torch.Tensor | None
    bias: torch.Tensor | None
    activation: str | None
    gate: str | None
    gate_layout: GateLayout
    gate_alpha: float
    gate_limit: float
    residual: torch.Tensor | None
    beta: float
    amax: torch.Tensor | None
    scale_d: float | torch.Tensor | None
    epilogue: Sequence[Item] | None
    rounding: str
    rounding_state: torch.Tensor | None
    scatter: torch.Tensor | None


def items(
    *,
    scale_a: float | torch.Tensor | None = None,
    scale_b: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    gate: str | None = None,
    gate_layout: GateLayout = "halves",
    gate_alpha: float = ALPHA,
    gate_limit: float = LIMIT,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    amax: torch.Tensor | None = None,
    scale_d: float | torch.Tensor | None = None,
    epilogue: Sequence[Item] | None = None,
    rounding: str = "nearest",
    rounding_state: torch.Tensor | None = None,
    scatter: torch.Tensor | None = None,
) -> Sequence[Item]:
    """Spell the keywords out as a list, in the order of `warploom.gemm`; or return the list.

    Stochastic rounding, or where rows go, comes last in either.
    """
    listed: list[Item] = []
    if scale_a is not None:
        listed.append(("scale_a", scale_a))
    if scale_b is not None:
        listed.append(("scale_b", scale_b))
    if bias is not None:
        listed.append(("bias", bias))
    if activation is not None:
        listed.append(("activation", activation))
    if gate is not None or gate_layout != "halves" or has_own_numbers(gate_alpha, gate_limit):
        _check_gate(gate, gate_layout, activation)
        listed.append(gate_item(gate, gate_layout, gate_alpha, gate_limit))
    if residual is not None:
        listed.append(("residual", residual, beta))
    if amax is not None:
        listed.append(("amax", amax))
    if scale_d is not None:
        listed.append(("scale_d", scale_d))
    if type(beta) is not float:  # a tensor would be waited for
        require_number("beta", beta, fix="pass a float, or scale the residual itself")
    if beta != 1 and residual is None:
        raise ProblemError(
            f"beta {shown(beta)} without residual",
            rule="must come with the residual that it scales",
            fix='leave it out; in an epilogue list, write ("residual", c, beta)',
        )
    if epilogue is not None and not isinstance(epilogue, list | tuple):
        raise ProblemError(
            f"epilogue {shown(epilogue)} of type {type(epilogue).__name__}",
            rule="must be a list of items",
            fix='for example [("bias", bias), ("activation", "relu")]',
        )
    if listed and epilogue:
        raise ProblemError(
            "epilogue= together with scale, bias, activation, gate, residual or amax",
            rule="must be one of them: keywords have one fixed order, a list has its own",
            fix="put all steps into the list",
        )
    if rounding != "nearest" or rounding_state is not None:
        check_rounding(rounding, rounding_state)
        if scatter is not None:
            raise ProblemError(
                f"scatter with rounding {rounding}",
                rule="must come with rounding nearest",
                fix="leave rounding out, or write the result to out[index] afterwards",
            )
        return [*(listed or epilogue or ()), ("stochastic_rounding", rounding_state)]
    if scatter is not None:
        return [*(listed or epilogue or ()), ("scatter", scatter)]
    return listed or epilogue or ()


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The keywords of an epilogue that is no list, as a function has them, and their defaults."""
    names = Keywords.__annotations__.keys() - {"epilogue"}
    parameters = signature(function).parameters
    return {name: one.default for name, one in parameters.items() if name in names}


def _check_gate(gate: object, layout: object, activation: str | None) -> None:
    """Raise ProblemError for an unknown layout of a gate, or one without a gate."""
    if layout not in LAYOUTS:
        raise ProblemError(
            f"gate_layout {shown(layout)}",
            rule=f"must be one of {', '.join(LAYOUTS)}",
            fix="leave it out where all columns of the gate come before those of up",
        )
    if gate is None and layout != "halves":
        raise ProblemError(
            f"gate_layout {layout} without gate",
            rule="must come with the gate whose columns are laid out like this",
            fix='leave it out, or add gate="silu"',
        )
    if activation is not None and gate is not None:
        raise ProblemError(
            f"activation {shown(activation)} with gate {shown(gate)}",
            rule="must be one of them: a gate has a function of its own",
            fix="leave one out, or put both into an epilogue list",
        )


class Items(Compound):
    """The items of an epilogue, in order. As an operator takes them they are flattened by steps."""

    schema = "str[] kinds, Tensor[] operands, float[] numbers"
    values = (
        *[kind for kind, one in KINDS.items() if one.step not in (Activation, Gate)],
        *[one.number for one in KINDS.values() if one.number],
    )
    trailing = True

    def key(self, value: Sequence[Item]) -> object:
        """All but scalars' values and addresses."""
        key = list[object]()
        for item in value:
            key += item[:1]
            key.append(len(item))
            for one in item[1 : 3 if item[0] in LOADING else 2]:
                if isinstance(one, torch.Tensor):
                    key += (
                        one.dtype,
                        one.shape,
                        one.stride(),
                        one.data_ptr() & 15,
                        one.get_device(),
                        one.is_neg(),
                    )
                else:
                    key.append(one if isinstance(one, str) else type(one))
        return tuple(key)

    def named(self, value: Sequence[Item]) -> list[tuple[str, torch.Tensor]]:
        """The items' tensors, each by the item's kind."""
        return [
            (item[0], one) for item in value for one in item[1:] if isinstance(one, torch.Tensor)
        ]

    def written(self, value: Sequence[Item]) -> list[tuple[str, torch.Tensor]]:
        """Those that are outputs of their steps."""
        return [(item[0], item[-1]) for item in value if item[0] in OUTPUTS]

    def addresses(self, value: Sequence[Item]) -> tuple[int, ...]:
        """The addresses of the items' tensors, in order."""
        addresses = list[int]()
        for item in value:
            for one in item[1:]:
                if isinstance(one, torch.Tensor):
                    addresses.append(one.data_ptr())
        return tuple(addresses)

    def numbers(self, value: Sequence[Item]) -> tuple[float, ...]:
        """The host scalars of the items, in the order of the kernel's fields."""
        numbers: list[float] = []
        for item in value:
            if not isinstance(item[1], str | torch.Tensor):
                numbers.append(float(item[1]))
            if len(item) > 2 and not isinstance(item[2], torch.Tensor):
                numbers.append(float(item[2]))
        return tuple(numbers)

    def numbered(self, value: Sequence[Item]) -> tuple[str, ...]:
        """The names that keywords have for these."""
        names: list[str] = []
        for item in value:
            if not isinstance(item[1], str | torch.Tensor):
                names.append(item[0])
            if len(item) > 2 and not isinstance(item[2], torch.Tensor):
                names.append(step_of(item).number)
        return tuple(names)

    def encode(self, value: Sequence[Item]) -> Sequence[object]:
        """A word for each item, and all tensors and numbers; outputs cross by their kinds."""
        flat = flatten(value)
        return flat.words, flat.tensors, flat.numbers

    def decode(
        self, values: Sequence[Any], written: Mapping[str, torch.Tensor | None]
    ) -> list[Item]:
        """The items again."""
        words, tensors, numbers = values
        return unflatten(words, Given(iter(tensors), iter(numbers), written))


ITEMS = Items()


@dataclass(frozen=True, slots=True)
class BoundEpilogue:
    """The steps of a call, and the names of the tensors and scalars that it hands the kernel."""

    steps: tuple[EpilogueStep, ...]
    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    pitch_c: tuple[int, ...]
    batch_pitches: tuple[int, ...]  # of what has a batch field, where D has batches
    paired: bool  # whether every operand can be read two elements at a time
    batched: bool  # whether D has batches, not rows of one matrix only
    columns: int  # of D


def bind(
    listed: Sequence[Item],
    batches: tuple[int, ...],
    m: int,
    n: int,
    device: int,
    *,
    batched: bool,
    k: int = 0,
) -> BoundEpilogue:
    """Check the items against products [*batches, m, n] of k each, on `device` (-1: CPU).

    All batches of D are rows of one matrix unless it is `batched`, or an operand can be read beside
    batches only. Returns their steps. Raises ProblemError naming the item, the rule and the fix.
    """
    if not listed:
        return BoundEpilogue((), (), (), (), (), paired=True, batched=batched, columns=n)
    at, bound = Extents(batches, m, n, k), list[tuple[Item, EpilogueStep, torch.Tensor | None]]()
    for item in listed:
        step, value = step_of(item).bind(item, at, device)
        bound.append((item, step, value))
        at = replace(at, n=step.columns(at.n))
    read = [(item, step, value) for item, step, value in bound if value is not None]
    batched |= not all(operand.in_rows(step.reads, value, batches) for _, step, value in read)
    pitches: list[int] = []
    batch_pitches: list[int] = []
    paired = True
    for item, step, value in read:
        apart: list[int] = []  # elements between what the step reads: rows, batches
        if step.pitched:
            rows_apart = step_of(item).row_pitch(value, batches)
            if batched:  # the stride of one row may be any
                rows_apart = value.stride(-2) if value.shape[-2] > 1 else 0
            pitches.append(cast("int", rows_apart))  # None is batched
            apart.append(pitches[-1])
        if batched and step.batch_field(0):
            batch_pitches.append(operand.batch_pitch(item, step.reads, value, batches))
            apart.append(batch_pitches[-1])
        if step.paired:
            aligned = 2 * value.element_size()
            paired &= value.data_ptr() % aligned == 0
            paired &= not step.loads or item[-1].data_ptr() % aligned == 0
            paired &= all(pitch % 2 == 0 for pitch in apart)
    steps = tuple(step for _, step, _ in bound)
    fields = [field for index, step in enumerate(steps) for field in step.fields(index)]
    return BoundEpilogue(
        steps=steps,
        tensors=tuple(field.name for field in fields if field.kind is Kind.POINTER),
        scalars=tuple(field.name for field in fields if field.kind is Kind.FLOAT),
        pitch_c=tuple(pitches),
        batch_pitches=tuple(batch_pitches),
        paired=paired,
        batched=batched,
        columns=at.n,
    )


def unseen(name: str) -> ProblemError:
    """The error of a call with such an output."""
    if name == "out":
        return ProblemError(
            "out with a tensor that requires grad",
            rule="autograd differentiates results that it has not seen before",
            fix="leave out=None, or call under torch.no_grad()",
        )
    if KINDS[name].no_gradient:
        return ProblemError(
            f"{name} with a tensor that requires grad",
            rule=f"must be of a call that is not differentiated: {KINDS[name].no_gradient}",
            fix="call under torch.no_grad()",
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
    in_place = index_of(listed) is None  # rows that are scattered are read and written elsewhere
    for item in listed:
        for value in item[1:]:
            if isinstance(value, torch.Tensor):
                step = step_of(item)
                beside = stored if step.overwrites and value is item[-1] else read
                beside += [(item[0], value)] * (
                    not (in_place and step.in_place and _same(value, out))
                )
    rule = "do not overlap; out may be exactly the residual" if in_place else "do not overlap"
    refuse_overlap(out, (*read, *stored), rule)
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
