"""What the operand of an epilogue's item is: its kind, and how it lies beside D [*batches, m, n].

Operands come in any shape that broadcasts as it reads: `natural` returns the one that all share.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from warploom.runtime.families.gemm.batches import step_pitch

Item = tuple[Any, ...]
Shape = tuple[int, ...]

SCALARS = ("scale", "scale_a", "scale_b", "scale_d")  # kinds whose value may be a number
_VECTORS = {"scale_a": "scale_row", "scale_b": "scale_column"}  # what they are beside that


def kind_of(item: Item) -> str:
    """The kind of an item; the keywords' scale_a, scale_b and scale_d are what their values are."""
    kind, value = item[0], item[1]
    if kind not in SCALARS:
        return str(kind)
    whole = not isinstance(value, torch.Tensor) or value.numel() == 1
    return "scale" if whole else _VECTORS.get(kind, "scale")


def extent(kind: str, m: int, n: int) -> Shape:
    """The dimensions of D that a kind's operand has, whatever its batches are."""
    return {"residual": (m, n), "scale_row": (m,)}.get(kind, (n,))


def natural(kind: str, value: torch.Tensor, batches: Shape, m: int, n: int) -> torch.Tensor | None:
    """Return a view [*own, *extent] whose own batches broadcast to D's, or None.

    Beside that shape an operand may have all rows of D in one dimension, or that of extent 1 which
    torch._scaled_mm asks for: [m, 1] and [1, n].
    """
    own = extent(kind, m, n)
    forms = [value]
    if kind == "residual" and value.dim():
        forms.append(value.unsqueeze(-2))
        value = _one_matrix(value)
    elif value.dim() > 1:
        forms.append(value.squeeze(-1 if kind == "scale_row" else -2))
    if kind in ("residual", "scale_row") and value.shape == (prod(batches) * m, *own[1:]):
        forms.append(value.reshape(*batches, *own))
    return next((form for form in forms if _fits(form, batches, own)), None)


def _one_matrix(c: torch.Tensor) -> torch.Tensor:
    """A residual with all dimensions but the last as one, where they are rows one pitch apart."""
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
    """Elements from row to row of a residual where all batches are rows of one matrix, or None."""
    spread = c.expand(*batches, *c.shape[-2:])
    return step_pitch(spread, spread.shape[:-1], trailing=1)


def asks_for_batches(listed: Sequence[Item], batches: Shape, m: int, n: int) -> bool:
    """True where an operand can be read beside batches of D, but not beside rows of one matrix."""
    for item in listed:
        kind = kind_of(item)
        if not isinstance(item[1], torch.Tensor) or kind in ("scale", "amax"):
            continue
        value = natural(kind, item[1], batches, m, n)
        if value is not None and not _in_rows(kind, value, batches):
            return True
    return False


def _in_rows(kind: str, value: torch.Tensor, batches: Shape) -> bool:
    if kind == "residual":
        return row_pitch(value, batches) is not None
    spread = value.expand(*batches, value.shape[-1])
    if kind == "scale_row":
        return spread.numel() < 2 or step_pitch(spread, spread.shape, trailing=0) == 1
    return step_pitch(spread, batches, trailing=1) == 0
