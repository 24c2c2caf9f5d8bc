"""What gemm's operators take, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch

from warploom.generator.families.gemm import Accumulation
from warploom.runtime.families._product.steps import unflatten
from warploom.runtime.families._product.steps.step import Given, Item
from warploom.runtime.families.gemm.gradient import gradients, once
from warploom.runtime.families.gemm.gradient_rule import (
    FLOATS,
    GradientOptions,
    Preactivation,
    numbers_of,
    read_by,
    rule,
    way_of,
)
from warploom.runtime.operator import is_distributed, no_gradient


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


def listed_of(call: Call, written: Mapping[str, torch.Tensor | None]) -> list[Item]:
    """The items that an operator was given, its outputs being `written`."""
    return unflatten(call.kinds, Given(iter(call.operands), iter(call.numbers), written))


def save(
    ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
    inputs: tuple[Any, ...],
    output: torch.Tensor | Sequence[torch.Tensor],
) -> None:
    """Keep what the gradients of an operator's call need."""
    call = Call(*inputs[:WIDTH])
    asked = Gradients(*inputs[WIDTH + len(Outputs._fields) :])
    results = [output] if isinstance(output, torch.Tensor) else output
    listed = read_by(listed_of(call, {}))
    tensors = (call.a, call.b, *call.operands)
    needed = tuple(one.requires_grad for one in tensors)
    stored = call.out_dtype in FLOATS
    how = way_of(listed, needed, preactivation=asked.preactivation, stored=stored)
    ctx.rule = rule(tensors, listed, needed, how)
    kept = [tensors[place] for place in ctx.rule.kept]
    if how in ("output", "save"):  # what is stored for that comes last
        kept.append(results[0 if how == "output" else -1])
    ctx.save_for_backward(*kept)
    ctx.set_materialize_grads(False)
    ctx.numbers = numbers_of(listed)
    dtype = asked.gradient_dtype or torch.bfloat16
    ctx.options = GradientOptions(call.accumulation, dtype, asked.accumulate_into)
    ctx.none = list(map(no_gradient, inputs))


def backward(ctx: Any, *arriving: Any) -> tuple[object, ...]:  # noqa: ANN401
    """Return the gradients of an operator's arguments, in their structure."""
    dd = arriving[0][0] if isinstance(arriving[0], list | tuple) else arriving[0]
    if dd is None:
        return tuple(ctx.none)
    given = (ctx.rule, ctx.numbers, ctx.options, dd, *ctx.saved_tensors)
    if any(map(is_distributed, given[3:])):
        from warploom.runtime.families.gemm import sharding  # which imports this module

        found = sharding.gradients(*given)
    else:
        found = once(partial(gradients, *given[:3]), *given[3:])
    results = list(ctx.none)
    results[:2], results[Call._fields.index("operands")] = found[:2], list(found[2:])
    return tuple(results)
