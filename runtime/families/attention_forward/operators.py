"""The operators of attention that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. Gradients are
operators themselves, so that a compiler sees what a backward pass reads and writes; with a mask of
blocks both passes have operators of their own, to which the mask crosses as tensors and sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.runtime.arguments import schema_of
from warploom.runtime.families._attention.block_mask import BlockMask
from warploom.runtime.families._attention.operands import empty_like
from warploom.runtime.families.attention_backward.call import BackwardCall, attention_backward
from warploom.runtime.families.attention_backward.reference import Gradients
from warploom.runtime.families.attention_forward import gradient, plan
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.families.attention_forward.operator_call import (
    BESIDE_BLOCKS,
    BLOCKS,
    FORWARD,
    FUNCTION,
    FURTHER,
    INTO,
    OPERANDS,
    OPTIONS,
)
from warploom.runtime.operator import register

_ARRIVING = "Tensor dout, Tensor? dlse"
_RESULTS = "Tensor out, Tensor lse"
_TENSORS = AttentionCall.declaration.graded  # beside q, k and v: some have gradients
_BACKWARD = (*OPERANDS, *FUNCTION, *OPTIONS, *FURTHER)
# A window crosses as two.
_COUNT = 1 + len(OPERANDS) + len(FUNCTION)  # of arguments before spec
_BEFORE_FURTHER = _COUNT + 1 + len(OPTIONS)


# ---- The forward pass ----------------------------------------------------------------------------


def _attention(*inputs: Any) -> Pair:
    with torch.no_grad():
        return plan.attention(AttentionCall(**AttentionCall.decoded(FORWARD, inputs)))


def _attention_into(*inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return plan.attention(AttentionCall(**AttentionCall.decoded(INTO, inputs)))[1]


def _fake_attention(*inputs: Any) -> Pair:
    return AttentionCall(*inputs[:3]).fake()


def _fake_attention_into(*inputs: Any) -> torch.Tensor:
    return AttentionCall(*inputs[:3]).fake()[1]


def _save(
    ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
    inputs: tuple[Any, ...],
    output: Pair,
) -> None:
    tensors = [one if isinstance(one, torch.Tensor) else None for one in inputs]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)
    ctx.others = [None if isinstance(one, torch.Tensor) else one for one in inputs]


def _saved(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> list[Any]:  # noqa: ANN401
    """What operators of gradients take first: dout, dlse, q, k, v, out, lse; then other inputs."""
    out, lse, *tensors = ctx.saved_tensors
    pairs = zip(tensors, ctx.others, strict=True)
    q, k, v, *rest = [other if tensor is None else tensor for tensor, other in pairs]
    return [torch.zeros_like(out) if dout is None else dout, dlse, q, k, v, out, lse, *rest]


def _differentiate(
    ctx: Any,  # noqa: ANN401
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    given, results = _saved(ctx, dout, dlse), 4  # dout, dlse, out and lse
    spec, causal = results + _COUNT, results + len(OPERANDS)
    # Lengths that were found equal stay so, even if cu_seqlens comes back as two tensors.
    if given[causal] == "equal":
        given[causal] = "bottom_right"
    needed = ctx.needs_input_grad
    wanted = needed[_BEFORE_FURTHER:]  # the last of None are left out
    found = _operator_gradients((*given[:spec], *given[spec + 1 :]), wanted)
    first = (one if need else None for one, need in zip(found[:3], needed, strict=False))
    rest = iter(found[3:])
    last = (next(rest) if need else None for need in wanted)
    return (*first, *[None] * (_BEFORE_FURTHER - 3), *last)


register(
    "attention",
    schema_of(FORWARD),
    returns="(Tensor, Tensor)",
    run=_attention,
    fake=_fake_attention,
    backward=_differentiate,
    save=_save,
)
register(
    "attention_into",
    schema_of(INTO),
    returns="Tensor",
    run=_attention_into,
    fake=_fake_attention_into,
)


# ---- The gradients -------------------------------------------------------------------------------


def _attention_backward(*inputs: Any) -> Gradients:
    return attention_backward(_pass(*inputs))


def _attention_backward_further(*inputs: Any) -> list[torch.Tensor]:
    of_tensors = zip(_TENSORS, inputs[-len(_TENSORS) :], strict=True)
    made = _pass(*inputs[: -len(_TENSORS)])
    made.prepare(tuple(name for name, is_wanted in of_tensors if is_wanted))
    return [*attention_backward(made), *made.further_gradients()]


def _pass(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> BackwardCall:
    """The pass that the operators' arguments stand for."""
    call = AttentionCall(**AttentionCall.decoded(_BACKWARD, (q, k, v, *rest)))
    return BackwardCall(call, out, lse, dout, dlse)


def _fake_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
) -> Gradients:
    return empty_like(q), empty_like(k), empty_like(v)


def _fake_attention_backward_further(*inputs: Any) -> list[torch.Tensor]:
    count = len(_TENSORS)
    further = inputs[-count - len(FURTHER) :][:count]
    made = [
        torch.empty_like(one)
        for one, is_wanted in zip(further, inputs[-count:], strict=True)
        if is_wanted and isinstance(one, torch.Tensor)
    ]
    return [*_fake_attention_backward(*inputs), *made]


def _operator_gradients(given: tuple[Any, ...], wanted: tuple[bool, ...]) -> Sequence[torch.Tensor]:
    """Run the operator that computes what is wanted: dq, dk, dv, and those of further tensors.

    `wanted` says so of these, of which the last may be left out.
    """
    if not any(wanted):
        found: Gradients = torch.ops.warploom.attention_backward(*given)
        return found
    count = len(_TENSORS)
    of_tensors = (*wanted[:count], *[False] * (count - len(wanted)))
    every: list[torch.Tensor] = torch.ops.warploom.attention_backward_further(*given, *of_tensors)
    return every


register(
    "attention_backward",
    *(_ARRIVING, schema_of(OPERANDS), _RESULTS, schema_of((*FUNCTION, *OPTIONS, *FURTHER))),
    returns="(Tensor, Tensor, Tensor)",
    run=_attention_backward,
    fake=_fake_attention_backward,
    backward=gradient.refuse_second_derivative,
)
register(
    "attention_backward_further",
    *(_ARRIVING, schema_of(OPERANDS), _RESULTS, schema_of((*FUNCTION, *OPTIONS))),
    schema_of(FURTHER).replace("=None", ""),  # others follow
    ", ".join(f"bool of_{name}" for name in _TENSORS),
    returns="Tensor[]",
    run=_attention_backward_further,
    fake=_fake_attention_backward_further,
    backward=gradient.refuse_second_derivative,
)


# ---- With a mask of blocks -----------------------------------------------------------------------


def _call_of_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    places: torch.Tensor,
    bits: torch.Tensor,
    block_q: int,
    block_kv: int,
    *rest: Any,
) -> AttentionCall:
    mask = BlockMask(places, bits, (block_q, block_kv), q.shape[2], k.shape[2])
    return AttentionCall(q, k, v, block_mask=mask, **AttentionCall.decoded(BESIDE_BLOCKS, rest))


def _attention_blocks(*inputs: Any) -> Pair:
    with torch.no_grad():
        return plan.attention(_call_of_blocks(*inputs))


def _attention_blocks_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> Gradients:
    return attention_backward(BackwardCall(_call_of_blocks(q, k, v, *rest), out, lse, dout, dlse))


def _differentiate_blocks(
    ctx: Any,  # noqa: ANN401
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    found = torch.ops.warploom.attention_blocks_backward(*_saved(ctx, dout, dlse))
    needed = ctx.needs_input_grad
    every = (*found, *[None] * (len(needed) - 3))
    return tuple(one if need else None for one, need in zip(every, needed, strict=True))


register(
    "attention_blocks",
    *(schema_of(OPERANDS), BLOCKS, schema_of(BESIDE_BLOCKS)),
    returns="(Tensor, Tensor)",
    run=_attention_blocks,
    fake=_fake_attention,
    backward=_differentiate_blocks,
    save=_save,
)
register(
    "attention_blocks_backward",
    *(_ARRIVING, schema_of(OPERANDS), _RESULTS, BLOCKS, schema_of(BESIDE_BLOCKS)),
    returns="(Tensor, Tensor, Tensor)",
    run=_attention_blocks_backward,
    fake=_fake_attention_backward,
    backward=gradient.refuse_second_derivative,
)
