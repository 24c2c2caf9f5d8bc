"""The torch side of the table of element types."""

from __future__ import annotations

import torch

from warploom.errors import ProblemError
from warploom.generator.elements import ELEMENTS, Element

TORCH: dict[str, torch.dtype] = {name: getattr(torch, row.torch) for name, row in ELEMENTS.items()}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH.items()}
BY_DTYPE: dict[torch.dtype, Element] = {dtype: ELEMENTS[name] for name, dtype in TORCH.items()}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""The largest number of each 8-bit type that values are scaled to."""


def name_of(dtype: torch.dtype, what: str) -> str:
    """Return the element name of `dtype`, or raise ProblemError saying what has it."""
    if dtype in NAMES:
        return NAMES[dtype]
    known = ", ".join(NAMES.values())
    raise ProblemError(
        f"{what} of {dtype}", rule=f"element types are {known}", fix=f"convert with {what}.to(...)"
    )


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the spacing of `dtype` above 1: the relative error of one rounding; 0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0
