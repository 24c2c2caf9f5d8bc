"""Kinds of calls that were seen before; one like the last is recognised in a few tenths of a us.

To spell out what decides a call (shapes, strides, types of each tensor) costs several us of the
host's time. Torch's guards, those of torch.compile, compare all of that in C++, and with it the
classes of tensors, whether they require grad, and what is set for a thread: autocast, inference
mode, the transforms of torch.func, tracing. They are not public, so where they are missing nothing
is kept, and the comparison of a plan that its user holds (`alike`) is made in Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Generic, Self, TypeVar
from weakref import WeakSet

import torch
from torch.autograd import forward_ad

from warploom.generator.locks import fork_lock, remember

KindT = TypeVar("KindT")
Entry = tuple[bool, object, Callable[..., bool], KindT]  # grad mode, options, guard, what is kept

_ALIKE = 8  # kinds that are kept of tensors of the same shapes, which guards tell apart
_shape = attrgetter("shape")
_lock = fork_lock()
_places: WeakSet[Kinds[object]] = WeakSet()


# ---- Tensors that are alike ----------------------------------------------------------------------


def properties(*tensors: torch.Tensor) -> tuple[object, ...]:
    """What two tensors must share to be alike."""
    return tuple((t.shape, t.stride(), t.dtype, t.get_device(), t.requires_grad) for t in tensors)


def negated(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Which of them torch has negated lazily: guards see it without being asked."""
    return tuple(tensor.is_neg() for tensor in tensors)


def alike(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Return a function that says whether as many tensors are each like the one given here.

    Those that require grad are recognised only where grad mode is off.
    """
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


# ---- What is kept of calls -----------------------------------------------------------------------


class Kinds(Generic[KindT]):
    """What is kept of the kinds of calls that come from one place, such as a layer.

    bound   the kinds that are kept, at least: of each combination of shapes there may be several
    A copy is empty: plans are neither copied nor pickled.
    """

    __slots__ = ("__weakref__", "_bound", "_known", "_last")

    def __init__(self, bound: int = 64) -> None:
        self._bound = bound
        self._last: Entry[KindT] | None = None
        self._known: dict[tuple[object, ...], tuple[Entry[KindT], ...]] = {}
        with _lock:
            _places.add(self)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[type[Self], tuple[int]]:
        return type(self), (self._bound,)

    def find(self, options: object, *tensors: torch.Tensor) -> KindT | None:
        """What is kept of calls like this one; None for a new kind, and where operators are seen.

        `options` are what decides a call beside its tensors, of which there are as many for equal
        options.
        """
        if torch._C._len_torch_dispatch_stack() > 0 or forward_ad._current_level >= 0:
            return None
        grad, last = torch.is_grad_enabled(), self._last
        if last is not None and last[0] is grad and last[1] == options and last[2](*tensors):
            return last[3]
        if not self._known:
            return None
        for entry in self._known.get((grad, options, *map(_shape, tensors)), ()):
            if entry[2](*tensors):
                self._last = entry
                return entry[3]
        return None

    def keep(self, kind: KindT, options: object, *tensors: torch.Tensor) -> None:
        """Keep `kind` for calls like this one, unless a tensor comes twice: guards take none."""
        fits = guard(*tensors) if len({id(one) for one in tensors}) == len(tensors) else None
        if fits is not None:
            grad = torch.is_grad_enabled()
            self._last = entry = grad, options, fits, kind
            key = grad, options, *map(_shape, tensors)
            others = [one for one in self._known.get(key, ()) if not one[2](*tensors)]
            remember(self._known, key, (entry, *others[: _ALIKE - 1]), self._bound)

    def clear(self) -> None:
        """Forget all."""
        self._last = None
        self._known.clear()


def forget() -> None:
    """Forget what is kept, everywhere in the process."""
    with _lock:
        places = list(_places)
    for place in places:
        place.clear()


os.register_at_fork(after_in_child=forget)
