"""What a plain argument of a public function must be: a boolean, a number, a dtype.

One spelling of each check, so that every function refuses the same values with the same words.
Python takes "no" for true and True for 1: neither is taken here. Warm calls ask none of these.
"""

from __future__ import annotations

from collections.abc import Collection
from numbers import Real
from typing import cast

import torch

from warploom.errors import ProblemError
from warploom.printable import brief

shown = brief  # any argument, shortly


def is_number(value: object) -> bool:
    """True for a real number that is no boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


_LARGEST = torch.finfo(torch.float32).max


def is_finite(value: object) -> bool:
    """True for a real number that is no boolean, and finite in fp32, as kernels are given it."""
    return is_number(value) and -_LARGEST <= cast(float, value) <= _LARGEST


_BOOLEAN_FIX = "pass the boolean itself: any string that is not empty would count as True"


def require_boolean(
    name: str, value: object, *, optional: bool = False, fix: str = _BOOLEAN_FIX
) -> None:
    """Raise ProblemError unless `value` is True or False, or None where that is `optional`."""
    if value is True or value is False or (optional and value is None):
        return
    raise ProblemError(
        f"{name} {shown(value)}",
        rule="must be True, False or None" if optional else "must be True or False",
        fix=fix,
    )


def require_number(name: str, value: object, *, fix: str = "pass a float") -> None:
    """Raise ProblemError unless `value` is a finite number."""
    if is_finite(value):
        return
    kind = "" if is_number(value) else f" of type {type(value).__name__}"
    raise ProblemError(f"{name} {shown(value)}{kind}", rule="must be a finite number", fix=fix)


def require_count(name: str, value: object) -> None:
    """Raise ProblemError unless `value` is an int of at least 0."""
    if type(value) is not int or value < 0:
        raise ProblemError(
            f"{name} {shown(value)}", rule="must be an int of at least 0", fix="use int(...)"
        )


def require_dtype(name: str, value: object, known: Collection[torch.dtype]) -> None:
    """Raise ProblemError unless `value` is one of the `known` dtypes."""
    if isinstance(value, torch.dtype) and value in known:
        return
    raise ProblemError(
        f"{name} {shown(value)}",
        rule=f"must be a torch.dtype: one of {', '.join(map(str, known))}",
        fix="pass the torch.dtype itself, for example torch.bfloat16",
    )
