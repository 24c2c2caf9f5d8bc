"""The epilogue of a call: from keywords, or a list in any order, to steps and their operands.

An item is `("scale", x)`, `("scale_row", v)`, `("scale_column", v)`, `("bias", v)`,
`("activation", name)`, `("residual", c, beta)` or `("amax", t)`; x is a float or a one-element
tensor, t an fp32 tensor of one element, which is raised to the largest magnitude there. The names
of keywords are kinds too: `("scale_a", y)`, y being x or v, `("scale_b", y)` and `("scale_d", x)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypedDict, cast, get_args

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import (
    Activation,
    Amax,
    Bias,
    EpilogueStep,
    Function,
    Residual,
    Scale,
)
from warploom.runtime.elements import name_of
from warploom.runtime.families.gemm.batches import step_pitch
from warploom.runtime.families.gemm.epilogue_operands import (
    SCALARS,
    extent,
    kind_of,
    natural,
    row_pitch,
)
from warploom.runtime.families.gemm.epilogue_operands import Item as Item
from warploom.runtime.tensors import shown

_KINDS = (*SCALARS, "scale_row", "scale_column", "bias", "activation", "residual", "amax")


class Keywords(TypedDict, total=False):
    """The keywords of a call that make its epilogue (see `warploom.gemm`)."""

    scale_a: float | torch.Tensor | None
    scale_b: float | torch.Tensor | None
    bias: torch.Tensor | None
    activation: str | None
    residual: torch.Tensor | None
    beta: float
    amax: torch.Tensor | None
    scale_d: float | torch.Tensor | None
    epilogue: Sequence[Item] | None


def items(
    *,
    scale_a: float | torch.Tensor | None = None,
    scale_b: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    amax: torch.Tensor | None = None,
    scale_d: float | torch.Tensor | None = None,
    epilogue: Sequence[Item] | None = None,
) -> Sequence[Item]:
    """Spell the keywords out as a list, in the order of `warploom.gemm`; or return the list."""
    listed: list[Item] = []
    if scale_a is not None:
        listed.append(("scale_a", scale_a))
    if scale_b is not None:
        listed.append(("scale_b", scale_b))
    if bias is not None:
        listed.append(("bias", bias))
    if activation is not None:
        listed.append(("activation", activation))
    if residual is not None:
        listed.append(("residual", residual, beta))
    if amax is not None:
        listed.append(("amax", amax))
    if scale_d is not None:
        listed.append(("scale_d", scale_d))
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
            "epilogue= beside scale, bias, activation, residual or amax",
            rule="the keywords mean one fixed order, the list means its own",
            fix="put everything into the list",
        )
    return listed or epilogue or ()


def signature(listed: Sequence[Item]) -> tuple[object, ...]:
    """What of the items decides kernel and launch: all but scalars' values and addresses."""
    return tuple((len(item), *item[:1], *map(_decisive, item[1:2])) for item in listed)


def _decisive(value: object) -> object:
    if isinstance(value, torch.Tensor):
        aligned = value.data_ptr() & 15
        return value.dtype, value.shape, value.stride(), aligned, value.get_device()
    return value if isinstance(value, str) else type(value)


def addresses(listed: Sequence[Item]) -> tuple[int, ...]:
    """The addresses of the items' tensors, in order."""
    return tuple(item[1].data_ptr() for item in listed if isinstance(item[1], torch.Tensor))


def scalars(listed: Sequence[Item]) -> tuple[float, ...]:
    """The host scalars of the items, in the order of the kernel's fields."""
    values: list[float] = []
    for item in listed:
        if item[0] == "residual":
            values.append(float(item[2]))
        elif item[0] in SCALARS and not isinstance(item[1], torch.Tensor):
            values.append(float(item[1]))
    return tuple(values)


@dataclass(frozen=True, slots=True)
class BoundEpilogue:
    """The steps of a call, and the names of the tensors and scalars that it hands the kernel."""

    steps: tuple[EpilogueStep, ...]
    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    pitch_c: tuple[int, ...]
    batch_pitches: tuple[int, ...]  # of what has a batch field, where D has batches
    paired: bool  # whether every operand can be read two elements at a time


def bind(
    listed: Sequence[Item],
    batches: tuple[int, ...],
    m: int,
    n: int,
    device: int,
    *,
    batched: bool,
) -> BoundEpilogue:
    """Check the items against D [*batches, m, n] on `device` (-1: CPU) and turn them into steps.

    Where it is not `batched`, all its batches are rows of one matrix. Raises ProblemError naming
    the item, the rule and the fix.
    """
    check_items(listed)
    steps: list[EpilogueStep] = []
    tensors: list[str] = []
    scalar_names: list[str] = []
    pitches: list[int] = []
    batch_pitches: list[int] = []
    paired = True
    for index, item in enumerate(listed):
        step, value = _step(item, batches, m, n, device)
        steps.append(step)
        apart: list[int] = []  # elements between what the step reads: rows, batches
        if isinstance(value, torch.Tensor):
            tensors.append(f"{item[0].partition('_')[0]}_{index}")
        elif isinstance(step, Scale):
            scalar_names.append(f"scale_{index}")
        if isinstance(step, Residual):
            scalar_names.append(f"residual_{index}_beta")
            rows_apart = value.stride(-2) if batched else row_pitch(value, batches)
            pitches.append(cast("int", rows_apart))  # None has asked for batches
            apart.append(pitches[-1])
        if batched and step.batch_field(index):
            batch_pitches.append(_batch_pitch(item, value, batches))
            apart.append(batch_pitches[-1])
        if step.reads in ("column", "fragment"):  # of neighbours in a row, which pairs are
            paired &= value.data_ptr() % (2 * value.element_size()) == 0
            paired &= all(pitch % 2 == 0 for pitch in apart)
    return BoundEpilogue(
        steps=tuple(steps),
        tensors=tuple(tensors),
        scalars=tuple(scalar_names),
        pitch_c=tuple(pitches),
        batch_pitches=tuple(batch_pitches),
        paired=paired,
    )


def _batch_pitch(item: Item, value: torch.Tensor, batches: tuple[int, ...]) -> int:
    pitch = step_pitch(value, batches, trailing=2 if item[0] == "residual" else 1)
    if pitch is not None:
        return pitch
    raise ProblemError(
        f"{item[0]} of shape {list(item[1].shape)} with strides {list(item[1].stride())}",
        rule=f"must have the batches of D {list(batches)} one pitch apart, or none",
        fix="use .contiguous()",
    )


def check_finite(listed: Sequence[Item]) -> None:
    """Raise ProblemError for a scale or a beta that is not a finite number."""
    for item in listed:
        if item[0] == "residual" and not _finite(item[2]):
            raise ProblemError(
                f"beta {shown(item[2])}",
                rule="must be a finite number",
                fix="scale the residual itself",
            )
        if item[0] in SCALARS and not isinstance(item[1], torch.Tensor) and not _finite(item[1]):
            raise ProblemError(
                f"{item[0]} {shown(item[1])}",
                rule="must be a finite number, or a tensor",
                fix="a tensor's contents are not looked at: infinities may stand there",
            )


def _finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_items(listed: Sequence[Item]) -> None:
    """Raise ProblemError for items of no kind, or of another length than theirs."""
    for item in listed:
        listing = isinstance(item, tuple | list)
        kind = item[0] if listing and len(item) else None
        if isinstance(kind, str) and kind in _KINDS and len(item) == 2 + (kind == "residual"):
            continue
        length = f" of length {len(item)}" if listing else ""
        raise ProblemError(
            f"epilogue item {shown(item)}{length}",
            rule=f"an item is (kind, value), the kind one of {', '.join(_KINDS)}; "
            "a residual is (kind, tensor, beta)",
            fix='for example ("bias", bias), ("activation", "relu"), ("residual", c, 1.0)',
        )


def _step(
    item: Item, batches: tuple[int, ...], m: int, n: int, device: int
) -> tuple[EpilogueStep, Any]:
    """The step of an item, and its value: of a tensor, the view that all shapes have in common."""
    kind, value = kind_of(item), item[1]
    if kind == "activation":
        if value not in get_args(Function):
            raise ProblemError(
                f"activation {shown(value)}",
                rule=f"must be one of {', '.join(get_args(Function))}",
                fix="use one of them, or apply it to the result",
            )
        return Activation(value), value
    if kind == "scale" and isinstance(value, Real) and not isinstance(value, bool):
        return Scale("host"), value
    value = _operand(item[0], kind, value, batches, m, n, device)
    if kind == "amax":
        return Amax(), value
    if kind == "residual":
        return Residual(_element(kind, value)), value
    if kind == "bias":
        return Bias(_element(kind, value)), value
    by: Any = {"scale": "device", "scale_row": "row", "scale_column": "column"}[kind]
    return Scale(by), value


def _element(kind: str, value: torch.Tensor) -> Literal["fp16", "bf16", "fp32"]:
    name = name_of(value.dtype, kind)
    if name in ("fp16", "bf16", "fp32"):
        return cast("Literal['fp16', 'bf16', 'fp32']", name)
    raise ProblemError(
        f"{kind} of {value.dtype}", rule="must be fp16, bf16 or fp32", fix="convert it"
    )


def _operand(
    said: str, kind: str, value: object, batches: tuple[int, ...], m: int, n: int, device: int
) -> torch.Tensor:
    """Check the tensor of an item that is called `said`, and return its natural view."""
    if not isinstance(value, torch.Tensor):
        rule = "must be a tensor, or a number" if kind == "scale" else "must be a tensor"
        raise ProblemError(f"{said} {shown(value)}", rule=rule, fix="pass a torch tensor")
    if value.get_device() != device:
        raise ProblemError(
            f"{said} on {value.device}",
            rule="must be on the device of a and b",
            fix="move it there",
        )
    if kind in ("scale", "amax"):
        if value.numel() != 1:
            fix = "reshape it, or give one number for all of D"
            raise ProblemError(
                f"{said} of shape {list(value.shape)}", rule="must have one element", fix=fix
            )
        seen: torch.Tensor | None = value
    else:
        seen = natural(kind, value, batches, m, n)
    if seen is None:
        each = {"residual": "element", "scale_row": "row"}.get(kind, "column")
        raise ProblemError(
            f"{said} of shape {list(value.shape)}",
            rule=f"must have shape {list(extent(kind, m, n))} here"
            + (f", or of that in batches of D {list(batches)}" if batches else ""),
            fix=f"reshape it, or give one number for each {each} of D",
        )
    if kind.startswith(("scale", "amax")) and value.dtype != torch.float32:
        raise ProblemError(f"{said} of {value.dtype}", rule="must be fp32", fix="use .float()")
    if seen.numel() > 1 and seen.stride(-1) != 1:
        raise ProblemError(
            f"{said} with strides {list(value.stride())}",
            rule="must be contiguous along its last dimension",
            fix="use .contiguous()",
        )
    return seen
