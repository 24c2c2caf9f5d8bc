"""What GEMM's operators take, declared once for their schemas, and how a call comes to one.

An epilogue crosses as its steps flatten it: a word for each, and their tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import torch

from warploom.generator.families.gemm import Accumulation
from warploom.runtime.families._product.operands import broadcast
from warploom.runtime.families._product.steps import columns, unflatten
from warploom.runtime.families._product.steps.step import Given, Item
from warploom.runtime.families.gemm.gradient_rule import (
    Preactivation,
)


class Call(NamedTuple):
    """What both operators take, in order, each with its type in their schemas."""

    a: Annotated[torch.Tensor, "Tensor"]
    b: Annotated[torch.Tensor, "Tensor"]
    kinds: Annotated[Sequence[str], "str[]"]
    operands: Annotated[Sequence[torch.Tensor], "Tensor[]"]
    numbers: Annotated[Sequence[float], "float[]"]
    out_dtype: Annotated[torch.dtype, "ScalarType"]
    accumulation: Annotated[Accumulation, "str"]
    spec: Annotated[str | None, "str?"]


class Gradients(NamedTuple):
    """How gradients are computed."""

    preactivation: Annotated[Preactivation, "str"] = "recompute"
    accumulate_into: Annotated[torch.Tensor | None, "Tensor?"] = None
    gradient_dtype: Annotated[torch.dtype | None, "ScalarType?"] = None


class Outputs(NamedTuple):
    """The outputs of steps as they were before; the operator returns them as they are then."""

    written_kinds: Annotated[Sequence[str], "str[]"]
    written: Annotated[Sequence[torch.Tensor], "Tensor[]"]


WIDTH = len(Call._fields)
_E8M0 = torch.float8_e8m0fnu


def listed_of(call: Call, written: Mapping[str, torch.Tensor | None]) -> list[Item]:
    """The items that an operator was given, its outputs being `written`."""
    return unflatten(call.kinds, Given(iter(call.operands), iter(call.numbers), written))


def dispatched(
    call: Call, out: torch.Tensor | None, written: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return D of a call by torch's dispatcher, whatever autograd is to know of it.

    Args:
        call: What the operators take.
        out: Where D goes; None for a new tensor.
        written: The outputs of steps, by their kinds.
    """
    if out is None and not written:
        result: torch.Tensor = torch.ops.warploom.gemm(*call)
        return result
    out = empty_result(call) if out is None else out
    # torch's inductor leaves an operator that writes beside e8m0, where it cannot compile it.
    operands = [one.float() if one.dtype == _E8M0 else one for one in call.operands]
    call = call._replace(operands=operands)
    torch.ops.warploom.gemm_out(*call, out=out, **written)
    return out


def empty_result(call: Call) -> torch.Tensor:
    """Return a tensor for D of a call, without contents."""
    n = columns(call.kinds, call.b.shape[-1])
    return empty_product(call.a, call.b, n, call.out_dtype)


def empty_product(a: torch.Tensor, b: torch.Tensor, n: int, out_dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of n columns for each row of a b, without contents."""
    return a.new_empty((*broadcast(a, b), a.shape[-2], n), dtype=out_dtype)
