"""Recognises tensors with the type, device, shape and strides of given ones, at a tenth of a call.

Whether they require grad counts too, and those that do are recognised only where grad mode is off.

Reading nine properties in Python costs 0.6 us, half of what a planned launch may add to the
driver's time; torch's own guards (those of torch.compile) compare in C++. They are not public, so
where they are missing the comparison is made in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def properties(*tensors: torch.Tensor) -> tuple[object, ...]:
    """What two tensors must share to be alike."""
    return tuple((t.shape, t.stride(), t.dtype, t.get_device(), t.requires_grad) for t in tensors)


def negated(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Which of them torch has negated lazily: guards see it without being asked."""
    return tuple(tensor.is_neg() for tensor in tensors)


def alike(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Return a function that says whether as many tensors are each like the one given here."""
    fits = _compared(tensors)
    if any(tensor.requires_grad for tensor in tensors):
        return lambda *others: not torch.is_grad_enabled() and fits(*others)
    return fits


def _compared(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    fits = guard(*tensors)
    if fits is not None:
        return fits
    known = properties(*tensors), negated(*tensors)
    return lambda *others: (properties(*others), negated(*others)) == known


def guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """Torch's comparison with these, which also sees classes and what is set for a thread.

    None where torch has none.
    """
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        check: Callable[..., bool] = guards(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        ).check
        return check if check(*tensors) is True else None
    except (AttributeError, TypeError):
        return None
