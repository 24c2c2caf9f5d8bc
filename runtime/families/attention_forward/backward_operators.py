"""The operators of attention's gradients: of q, k and v, or of further tensors too.

Operators themselves, so that a compiler sees what a backward pass reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch

from warploom.runtime.families._attention.operands import empty_like
from warploom.runtime.families.attention_backward import further_gradients
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_backward.plan import attention_backward
from warploom.runtime.families.attention_backward.reference import Gradients
from warploom.runtime.families.attention_forward import gradient
from warploom.runtime.families.attention_forward.operator_arguments import (
    TENSORS,
    Function,
    Further,
    Operands,
    Options,
    call_of,
)
from warploom.runtime.operator import register


class _Wanted(NamedTuple):
    """Which of their gradients are wanted: never those of slopes, masks and states."""

    of_sinks: Annotated[bool, "bool"]
    of_alibi_slopes: Annotated[bool, "bool"]
    of_bias: Annotated[bool, "bool"]
    of_mask: Annotated[bool, "bool"]
    of_dropout_state: Annotated[bool, "bool"]


class _Arriving(NamedTuple):
    dout: Annotated[torch.Tensor, "Tensor"]
    dlse: Annotated[torch.Tensor | None, "Tensor?"]


class _Results(NamedTuple):
    out: Annotated[torch.Tensor, "Tensor"]
    lse: Annotated[torch.Tensor, "Tensor"]


class _Further(NamedTuple):
    """Those of Further, without defaults: others follow."""

    sinks: Annotated[torch.Tensor | None, "Tensor?"]
    alibi_slopes: Annotated[torch.Tensor | None, "Tensor?"]
    bias: Annotated[torch.Tensor | None, "Tensor?"]
    mask: Annotated[torch.Tensor | None, "Tensor?"]
    dropout_state: Annotated[torch.Tensor | None, "Tensor?"]
    dropout_p: Annotated[float | None, "float?"]


def _attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> Gradients:
    return attention_backward(_pass(dout, dlse, q, k, v, out, lse, rest))


def _attention_backward_further(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> list[torch.Tensor]:
    wanted = _Wanted(*rest[-len(_Wanted._fields) :])
    made = _pass(dout, dlse, q, k, v, out, lse, rest[: -len(wanted)])
    further_gradients.prepare(made, tuple(n for n, one in zip(TENSORS, wanted, strict=True) if one))
    return [*attention_backward(made), *further_gradients.of_pass(made)]


def _pass(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rest: tuple[Any, ...],
) -> BackwardCall:
    """The pass that the operators' arguments stand for; `rest` follows _Results."""
    count = len(Function._fields)
    deterministic, spec, *further = rest[count:]
    call = call_of((q, k, v, *rest[:count]), tuple(further))
    call.deterministic, call.backward_spec = deterministic, spec
    return BackwardCall(call, out, lse, dout, dlse)


# ---- Without data --------------------------------------------------------------------------------


def _fake_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
) -> Gradients:
    return empty_like(q), empty_like(k), empty_like(v)


def _fake_attention_backward_further(*given: Any) -> list[torch.Tensor]:
    wanted = _Wanted(*given[-len(_Wanted._fields) :])
    further = Further(*given[-len(wanted) - len(Further._fields) : -len(wanted)])[: len(wanted)]
    made = [
        torch.empty_like(one)
        for one, need in zip(further, wanted, strict=True)
        if need and isinstance(one, torch.Tensor)
    ]
    return [*_fake_attention_backward(*given), *made]


register(
    "attention_backward",
    _Arriving,
    Operands,
    _Results,
    Function,
    Options,
    Further,
    returns="(Tensor, Tensor, Tensor)",
    run=_attention_backward,
    fake=_fake_attention_backward,
    backward=gradient.refuse_second_derivative,
)
register(
    "attention_backward_further",
    _Arriving,
    Operands,
    _Results,
    Function,
    Options,
    _Further,
    _Wanted,
    returns="Tensor[]",
    run=_attention_backward_further,
    fake=_fake_attention_backward_further,
    backward=gradient.refuse_second_derivative,
)


def gradients(given: tuple[Any, ...], wanted: tuple[bool, ...]) -> Sequence[torch.Tensor]:
    """Run the operator that computes what is wanted: dq, dk, dv, and those of further tensors.

    `given` is all but _Wanted; `wanted` those fields, of which the last may be left out.
    """
    if not any(wanted):
        found: Gradients = torch.ops.warploom.attention_backward(*given)
        return found
    count = len(_Wanted._fields)
    asked = _Wanted(*wanted[:count], *[False] * (count - len(wanted)))
    every: list[torch.Tensor] = torch.ops.warploom.attention_backward_further(*given, *asked)
    return every
