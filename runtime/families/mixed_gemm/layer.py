"""activation(x W^T + bias) of a packed weight, as a layer calls it: with the least on the host.

A layer keeps the plan of each kind of its calls, and how they are differentiated, as that of gemm
does: a call like an earlier one makes no key. What would be copied for a kernel goes the way of
`mixed_gemm`, as does what compilers and modes are to see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable

from warploom.quantization import Metadata, PackedWeight
from warploom.runtime.families._product.epilogue import items as epilogue_items
from warploom.runtime.families.mixed_gemm.api import mixed_gemm
from warploom.runtime.families.mixed_gemm.call import MixedGemmCall
from warploom.runtime.families.mixed_gemm.gradient import (
    Differentiated,
    differentiated,
    gradients,
    save,
)
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import without_memory
from warploom.runtime.plan import Plan, planned
from warploom.runtime.tensors import UnlikeError, WithoutMemoryError, launchable

Read = tuple[torch.Tensor, ...]
"""x, the weight's tensors and, where there is one, the bias."""


class Call(NamedTuple):
    """What a layer's calls have in common, beside tensors. `biased`: the last of these is one."""

    metadata: Metadata
    activation: str | None
    biased: bool


class Layer:
    """The calls of one layer, and what is kept of their kinds; a copy keeps nothing."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: Kinds[_Kind] = Kinds()

    def again(self, call: Call, read: Read) -> torch.Tensor | None:
        """What `call` returns, if it was called alike; None where that is to be called.

        Not for compilers to trace.
        """
        kind = self._kinds.find(call, *read)
        if kind is None:
            return None
        try:
            return kind.run(read)
        except UnlikeError:  # their addresses, which are new
            return None

    def call(self, call: Call, read: Read) -> torch.Tensor:
        """Return `mixed_gemm` of x [.., m, k] and a packed weight [n, k], with this epilogue.

        What is found out is kept for calls alike. Raises ProblemError as `mixed_gemm` does.
        """
        if launchable(*read) and not torch._C._is_any_autocast_enabled():
            with contextlib.suppress(UnlikeError, WithoutMemoryError):  # that has another way
                kind = _kind(call, read)
                if kind is not None:
                    self._kinds.keep(kind, call, *read)
                    return kind.run(read)
        x, weight, bias = _parts(call, read)
        return mixed_gemm(x, weight, bias=bias, activation=call.activation)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Kind:
    """What is known of a kind of call.

    like   a tensor without memory, of the result's shape and type
    how    it is differentiated; None: it is not
    """

    plan: Plan[Any, torch.Tensor]
    call: Call
    like: torch.Tensor
    how: Differentiated | None

    def run(self, read: Read) -> torch.Tensor:
        return self.launch(read) if self.how is None else _apply(self, *read)

    def launch(self, read: Read) -> torch.Tensor:
        """The result, which autograd does not see."""
        d = torch.empty_like(self.like)
        addresses = [one.data_ptr() for one in read]
        addresses.insert(-1 if self.call.biased else len(read), d.data_ptr())
        self.plan.run_at((tuple(addresses), ()), d, _call, self.call, read)
        return d


def _kind(call: Call, read: Read) -> _Kind | None:
    """What is to be known of calls like this one; None where they are for `mixed_gemm`."""
    made = _call(call, read)
    plan: Plan[Any, torch.Tensor] = planned(made, Plan)
    if plan.copies:
        return None
    how = None
    if torch.is_grad_enabled() and made.requires_grad:
        made.refuse()
        needed = tuple(one.requires_grad for one in _read(call, read))
        how = differentiated(made.weight, made.listed, made.a.dtype, needed)
    details = plan.details
    like = without_memory(details.out_shape, details.out_dtype, read[0].device)
    return _Kind(plan, call, like, how)


class _Layer(torch.autograd.Function):
    """The result of a call, differentiable in x and the bias."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        kind: _Kind,
        *read: torch.Tensor,
    ) -> torch.Tensor:
        end = len(read) - kind.call.biased
        save(ctx, cast("Differentiated", kind.how), read[1:end], _read(kind.call, read))
        return kind.launch(read)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dd: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients that are wanted."""
        dx, *of_bias = gradients(ctx, dd)
        return None, dx, *[None] * len(ctx.how.names), *of_bias


# Function.apply itself only adds what torch.func asks for, whose tensors no plan takes.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Layer).apply


def _read(call: Call, read: Read) -> Read:
    """What a gradient may be of: x and the bias."""
    return (read[0], read[-1]) if call.biased else read[:1]


def _parts(call: Call, read: Read) -> tuple[torch.Tensor, PackedWeight, torch.Tensor | None]:
    """x, the weight and the bias. It has zero points per channel only beside such scales."""
    bias = read[-1] if call.biased else None
    x, data, *channels = read if bias is None else read[:-1]
    return x, PackedWeight(data, call.metadata, *channels), bias


def _call(call: Call, read: Read) -> MixedGemmCall:
    x, weight, bias = _parts(call, read)
    return MixedGemmCall(x, weight, epilogue_items(bias=bias, activation=call.activation))
