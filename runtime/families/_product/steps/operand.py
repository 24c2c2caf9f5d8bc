"""The tensor of an epilogue's item: how it lies beside D, by what is read of it.

It comes in any shape that broadcasts as it reads: `natural` returns the one that all share.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal, cast

import torch

from warploom.errors import ProblemError
from warploom.generator.step import Reads
from warploom.runtime.elements import name_of
from warploom.runtime.families._product.operands import step_pitch
from warploom.runtime.operands import refuse_repeated
from warploom.runtime.tensors import shown

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extents:
    """Those of D [*batches, m, n], or of what it is before steps have halved n, and of k, which is
    summed over; k is 0 where only D counts.
    """

    batches: Shape
    m: int
    n: int
    k: int = 0

    def own(self, reads: Reads) -> Shape:
        """The dimensions that an operand has, whatever its batches are."""
        found: dict[Reads, Shape] = {"row": (self.m,), "column": (self.n,)}
        return found.get(reads, (self.m, self.n) if reads == "fragment" else ())


def natural(reads: Reads, value: torch.Tensor, at: Extents) -> torch.Tensor | None:
    """Return a view [*batches, *own] whose batches broadcast to D's, or None.

    Beside that shape an operand may have all rows of D in one dimension, or that of extent 1 which
    torch._scaled_mm asks for: [m, 1] and [1, n]. What has one element is as it is.
    """
    own = at.own(reads)
    if not own:
        return value if value.numel() == 1 else None
    forms = [value]
    if reads == "fragment" and value.dim():
        forms.append(value.unsqueeze(-2))
        value = _one_matrix(value)
    elif value.dim() > 1:
        forms.append(value.squeeze(-1 if reads == "row" else -2))
    if reads != "column" and value.shape == (prod(at.batches) * at.m, *own[1:]):
        forms.append(value.reshape(*at.batches, *own))
    return next((form for form in forms if _fits(form, at.batches, own)), None)


def _one_matrix(c: torch.Tensor) -> torch.Tensor:
    """A matrix with all dimensions but the last as one, where they are rows one pitch apart."""
    pitch = step_pitch(c, c.shape[:-1], trailing=1) if c.dim() > 2 else None
    if pitch is None:
        return c
    return c.as_strided((c.shape[:-1].numel(), c.shape[-1]), (pitch, c.stride(-1)))


def _fits(value: torch.Tensor, batches: Shape, own: Shape) -> bool:
    leading = value.dim() - len(own)
    if not 0 <= leading <= len(batches) or value.shape[leading:] != own:
        return False
    pairs = zip(reversed(value.shape[:leading]), reversed(batches), strict=False)
    return all(count in (1, extent) for count, extent in pairs)


def row_pitch(c: torch.Tensor, batches: Shape) -> int | None:
    """Elements from row to row of a matrix where all batches are rows of one, or None."""
    spread = c.expand(*batches, *c.shape[-2:])
    return step_pitch(spread, spread.shape[:-1], trailing=1)


def in_rows(reads: Reads, value: torch.Tensor, batches: Shape) -> bool:
    """True where a natural view can be read beside rows of one matrix that are D's batches."""
    if reads == "nothing" or not batches:
        return True
    if reads == "fragment":
        return row_pitch(value, batches) is not None
    spread = value.expand(*batches, value.shape[-1])
    if reads == "row":
        return spread.numel() < 2 or step_pitch(spread, spread.shape, trailing=0) == 1
    return step_pitch(spread, batches, trailing=1) == 0


def batch_pitch(item: tuple[Any, ...], reads: Reads, value: torch.Tensor, batches: Shape) -> int:
    """Elements between the batches of an item's tensor, whose natural view is `value`.

    Raises ProblemError where no one pitch leads through them.
    """
    pitch = step_pitch(value, batches, trailing=2 if reads == "fragment" else 1)
    if pitch is not None:
        return pitch
    raise ProblemError(
        f"{item[0]} of shape {list(item[1].shape)} with strides {list(item[1].stride())}",
        rule=f"must have the batches of D {list(batches)} at one stride, or none",
        fix="use .contiguous()",
    )


def checked(
    item: tuple[Any, ...], reads: Reads, at: Extents, device: int, *, fp32: bool
) -> torch.Tensor:
    """Check the tensor of an item, and return its natural view."""
    said, value = item[0], item[1]
    if not isinstance(value, torch.Tensor):
        raise ProblemError(
            f"{said} {shown(value)}", rule="must be a tensor", fix="pass a torch tensor"
        )
    if value.get_device() != device:
        raise ProblemError(
            f"{said} on {value.device}",
            rule="must be on the device of a and b",
            fix="move it there",
        )
    seen = natural(reads, value, at)
    if seen is None:
        raise _of_another_shape(said, reads, value, at)
    if fp32 and value.dtype != torch.float32:
        raise ProblemError(f"{said} of {value.dtype}", rule="must be fp32", fix="use .float()")
    if seen.numel() > 1 and seen.shape[-1] > 1 and seen.stride(-1) != 1:
        raise ProblemError(
            f"{said} with strides {list(value.stride())}",
            rule="must be contiguous along its last dimension",
            fix="use .contiguous()",
        )
    return seen


def require_each(item: tuple[Any, ...], reads: Reads, value: torch.Tensor, at: Extents) -> None:
    """Raise ProblemError for an output without a place of its own for each batch of D."""
    refuse_repeated(item[0], item[1])
    shape = (*at.batches, *at.own(reads))
    if value.numel() != prod(shape):
        raise ProblemError(
            f"{item[0]} of shape {list(item[1].shape)}",
            rule=f"must have shape {list(shape)}: it is stored, and nothing of it is shared",
            fix="make it in that shape",
        )


def _of_another_shape(said: str, reads: Reads, value: torch.Tensor, at: Extents) -> ProblemError:
    what, own = f"{said} of shape {list(value.shape)}", at.own(reads)
    if not own:
        fix = "reshape it, or give one number for all of D"
        return ProblemError(what, rule="must have one element", fix=fix)
    each = {"fragment": "element", "row": "row"}.get(reads, "column")
    return ProblemError(
        what,
        rule=f"must have shape {list(own)} here"
        + (f", or of that in batches of D {list(at.batches)}" if at.batches else ""),
        fix=f"reshape it, or give one number for each {each} of D",
    )


def float_type(kind: str, value: torch.Tensor) -> Literal["fp16", "bf16", "fp32"]:
    """The element type of a tensor that must be fp16, bf16 or fp32; else ProblemError."""
    name = name_of(value.dtype, kind)
    if name in ("fp16", "bf16", "fp32"):
        return cast("Literal['fp16', 'bf16', 'fp32']", name)
    raise ProblemError(
        f"{kind} of {value.dtype}", rule="must be fp16, bf16 or fp32", fix="convert it"
    )


def fp32_tensor(item: tuple[Any, ...], device: int) -> torch.Tensor:
    """The value of an item; ProblemError where it is no fp32 tensor on the device of a and b."""
    kind, value = item[0], item[1]
    if not isinstance(value, torch.Tensor):
        raise ProblemError(
            f"{kind} {shown(value)}", rule="must be a tensor", fix="pass a torch tensor"
        )
    if value.get_device() != device or value.dtype != torch.float32:
        raise ProblemError(
            f"{kind} of {value.dtype} on {value.device}",
            rule="must be fp32 on the device of a and b",
            fix="make it there",
        )
    return value
