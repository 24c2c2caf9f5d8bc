"""Tensors that torch has negated lazily: their memory holds every value with the other sign.

`x.conj().imag` sets the negative bit (`Tensor.is_neg()`), which torch's operators resolve and
kernels do not see. A plan resolves what its kernel reads, as a copy that is counted, and refuses
what its kernel writes. Signatures and torch's guards tell negated tensors from others, so that a
warm call of plain tensors asks no more than that. The conjugate bit is set for complex tensors
only, which no kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch

from warploom.errors import ProblemError
from warploom.runtime.call import Call
from warploom.runtime.counters import counters
from warploom.runtime.tensors import Named

CallT = TypeVar("CallT", bound=Call[Any, Any])
Copied = Mapping[int, torch.Tensor]  # by the identity of what they stand for


def negated(given: Named) -> dict[str, torch.Tensor]:
    """Those tensors that have the negative bit, by their names."""
    return {
        name: value for name, value in given if isinstance(value, torch.Tensor) and value.is_neg()
    }


def refuse_negated(given: Named, rule: str = "must not be: kernels write its memory") -> None:
    """Raise ProblemError for the first tensor that has the negative bit."""
    for name, value in negated(given).items():
        raise ProblemError(
            f"{name} {list(value.shape)} that torch has negated lazily (is_neg())",
            rule=rule,
            fix=f"pass {name}.resolve_neg(), which is a tensor of its own",
        )


def resolved(call: CallT) -> CallT:
    """The same call, of copies of what is negated; the call itself where nothing is."""
    return _with(call, _resolve)


def laid_out_as_resolved(call: CallT) -> CallT:
    """The same call with uninitialised tensors in the places of those copies, for a plan."""
    return _with(call, _room)


def _with(call: CallT, made: Callable[[str, torch.Tensor], torch.Tensor]) -> CallT:
    copies = {id(one): made(name, one) for name, one in negated(call.named()).items()}
    return cast("CallT", _replaced(call, copies)) if copies else call


def _resolve(name: str, tensor: torch.Tensor) -> torch.Tensor:
    counters.add("copies")
    return tensor.resolve_neg()


def _room(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bool or (tensor.is_floating_point() and tensor.itemsize == 1):
        raise ProblemError(
            f"{name} of {tensor.dtype} that torch has negated lazily (is_neg())",
            rule="must be of a type that torch negates",
            fix="convert what it is a view of",
        )
    return torch.empty_like(tensor, requires_grad=tensor.requires_grad)


def _replaced(value: object, copies: Copied) -> object:
    """A call, or a part of one, with copies in the places of what they stand for."""
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if isinstance(value, tuple | list):  # items of an epilogue, gradients
        parts = tuple(_replaced(one, copies) for one in value)
        same = all(one is other for one, other in zip(parts, value, strict=True))
        return value if same else parts
    if is_dataclass(value) and not isinstance(value, type):
        found = {
            one.name: new
            for one in fields(value)
            if one.init and (new := _replaced(old := getattr(value, one.name), copies)) is not old
        }
        return replace(value, **found)
    return value
