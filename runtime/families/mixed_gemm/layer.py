"""activation(x W^T + bias) of a packed weight, as a layer calls it: with the least on the host.

A layer keeps the plan of each kind of its calls, as that of gemm does: a call like an earlier one
makes no key. What is differentiated goes the way of `mixed_gemm`, as does what would be copied for
a kernel, and what compilers and modes are to see.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from warploom.quantization import Metadata, PackedWeight
from warploom.runtime.families._product.epilogue import items as epilogue_items
from warploom.runtime.families.mixed_gemm.api import mixed_gemm
from warploom.runtime.families.mixed_gemm.call import MixedGemmCall
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
        differentiated = torch.is_grad_enabled() and any(one.requires_grad for one in read)
        if not (differentiated or torch._C._is_any_autocast_enabled()) and launchable(*read):
            with contextlib.suppress(UnlikeError, WithoutMemoryError):  # that has another way
                plan = planned(_call(call, read), Plan)
                if not plan.copies:
                    details = plan.details
                    like = without_memory(details.out_shape, details.out_dtype, read[0].device)
                    kind = _Kind(plan, call, like)
                    self._kinds.keep(kind, call, *read)
                    return kind.run(read)
        x, weight, bias = _parts(call, read)
        return mixed_gemm(x, weight, bias=bias, activation=call.activation)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Kind:
    """What is known of a kind of call. `like` has the result's shape and type, and no memory."""

    plan: Plan[Any, torch.Tensor]
    call: Call
    like: torch.Tensor

    def run(self, read: Read) -> torch.Tensor:
        d = torch.empty_like(self.like)
        addresses = [one.data_ptr() for one in read]
        addresses.insert(-1 if self.call.biased else len(read), d.data_ptr())
        self.plan.run_at((tuple(addresses), ()), d, _call, self.call, read)
        return d


def _parts(call: Call, read: Read) -> tuple[torch.Tensor, PackedWeight, torch.Tensor | None]:
    """x, the weight and the bias. It has zero points per channel only beside such scales."""
    bias = read[-1] if call.biased else None
    x, data, *channels = read if bias is None else read[:-1]
    return x, PackedWeight(data, call.metadata, *channels), bias


def _call(call: Call, read: Read) -> MixedGemmCall:
    x, weight, bias = _parts(call, read)
    return MixedGemmCall(x, weight, epilogue_items(bias=bias, activation=call.activation))
