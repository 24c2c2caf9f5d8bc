"""The operators of attention that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. Gradients are
operators themselves, so that a compiler sees what a backward pass reads and writes; with a mask of
blocks both passes have operators of their own, to which the mask crosses as tensors and sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch

from warploom.runtime.families._attention.block_mask import BlockMask
from warploom.runtime.families._attention.operands import empty_like
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_backward import further_gradients
from warploom.runtime.families.attention_backward.call import BackwardCall, attention_backward
from warploom.runtime.families.attention_backward.reference import Gradients
from warploom.runtime.families.attention_forward import gradient, plan
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.families.attention_forward.operator_call import (
    TENSORS,
    BlocksFunction,
    Dropout,
    Function,
    Further,
    MaskOfBlocks,
    Operands,
    Options,
    Spec,
    call_of,
)
from warploom.runtime.operator import register


class _Into(NamedTuple):
    """Not called `out`: torch.compile refuses operators with a strided one."""

    result: Annotated[torch.Tensor, "Tensor(a!)"]


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


# ---- The forward pass ----------------------------------------------------------------------------


_GIVEN = len(Operands._fields) + len(Function._fields)
_BEFORE_FURTHER = _GIVEN + len(Spec._fields) + len(Options._fields)


def _attention(*inputs: Any) -> Pair:
    spec, _, _, *further = inputs[_GIVEN:]  # how gradients are computed is no matter here
    call = call_of(inputs[:_GIVEN], tuple(further))
    call.spec = spec
    with torch.no_grad():
        return plan.attention(call)


def _attention_into(*inputs: Any) -> torch.Tensor:
    spec, result, *further = inputs[_GIVEN:]
    call = call_of(inputs[:_GIVEN], tuple(further))
    call.spec, call.out = spec, result
    with torch.no_grad():
        return plan.attention(call)[1]


def _fake_attention(q: torch.Tensor, *rest: Any) -> Pair:
    return empty_like(q), _fake_attention_into(q, *rest)


def _fake_attention_into(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
    return q.new_empty(shape, dtype=torch.float32)


def _save(
    ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
    inputs: tuple[Any, ...],
    output: Pair,
) -> None:
    q, k, v, *given = inputs
    count = len(Function._fields)
    function, rest = Function(*given[:count]), given[count:]
    _, deterministic, backward_spec, *further, dropout_p = rest
    offsets = function.cu_seqlens_q, function.cu_seqlens_k
    ctx.save_for_backward(q, k, v, *output, *offsets, *further)
    ctx.set_materialize_grads(False)
    # Lengths that were found equal stay so, even if cu_seqlens comes back as two tensors.
    causal = "bottom_right" if function.causal == "equal" else function.causal
    ctx.function = function._replace(causal=causal, cu_seqlens_q=None, cu_seqlens_k=None)
    ctx.options, ctx.dropout_p = (deterministic, backward_spec), dropout_p


def _differentiate(
    ctx: Any,  # noqa: ANN401
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *further = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    function = ctx.function._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    needed = ctx.needs_input_grad
    given = (dout, dlse, q, k, v, out, lse, *function, *ctx.options, *further, ctx.dropout_p)
    wanted = needed[_BEFORE_FURTHER:]  # the last of None are left out
    found = _operator_gradients(given, wanted)
    first = (one if need else None for one, need in zip(found[:3], needed, strict=False))
    rest = iter(found[3:])
    last = (next(rest) if need else None for need in wanted)
    return (*first, *[None] * (_BEFORE_FURTHER - 3), *last)


register(
    "attention",
    Operands,
    Function,
    Spec,
    Options,
    Further,
    returns="(Tensor, Tensor)",
    run=_attention,
    fake=_fake_attention,
    backward=_differentiate,
    save=_save,
)
register(
    "attention_into",
    Operands,
    Function,
    Spec,
    _Into,
    Further,
    returns="Tensor",
    run=_attention_into,
    fake=_fake_attention_into,
)


# ---- The gradients -------------------------------------------------------------------------------


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


def _operator_gradients(given: tuple[Any, ...], wanted: tuple[bool, ...]) -> Sequence[torch.Tensor]:
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


# ---- With a mask of blocks -----------------------------------------------------------------------


_BEFORE_DROPOUT = (
    len(MaskOfBlocks._fields)
    + len(BlocksFunction._fields)
    + len(Spec._fields)
    + len(Options._fields)
)


def _mask(q: torch.Tensor, k: torch.Tensor, *given: Any) -> BlockMask:
    places, bits, block_q, block_kv = MaskOfBlocks(*given)
    return BlockMask(places, bits, (block_q, block_kv), q.shape[2], k.shape[2])


def _blocks_keywords(given: tuple[Any, ...]) -> tuple[str | None, Options, dict[str, Any]]:
    """Of what follows q, k and v: spec, options, and what both passes take beside the mask."""
    dropout_p, dropout_state = Dropout(*given[_BEFORE_DROPOUT:])  # the last of None are left out
    keywords = BlocksFunction(*given[4:6])._asdict()
    keywords |= {"dropout_p": dropout_p or 0.0, "dropout_state": dropout_state}
    spec, *options = given[6:_BEFORE_DROPOUT]
    return spec, Options(*options), keywords


def _attention_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> Pair:
    mask, (spec, _, keywords) = _mask(q, k, *given[:4]), _blocks_keywords(given)
    with torch.no_grad():
        return plan.attention(AttentionCall(q, k, v, spec=spec, block_mask=mask, **keywords))


def _attention_blocks_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask, (_, options, keywords) = _mask(q, k, *given[:4]), _blocks_keywords(given)
    forward = Arguments(
        q,
        k,
        v,
        deterministic=options.deterministic,
        backward_spec=options.backward_spec,
        block_mask=mask,
        **keywords,
    )
    return attention_backward(BackwardCall(forward, out, lse, dout, dlse))


def _save_blocks(
    ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
    inputs: tuple[Any, ...],
    output: Pair,
) -> None:
    q, k, v, places, bits, *rest = inputs
    dropped = Dropout(*rest[_BEFORE_DROPOUT - 2 :])
    ctx.rest = (*rest[: _BEFORE_DROPOUT - 2], dropped.dropout_p)
    ctx.save_for_backward(q, k, v, *output, places, bits, dropped.dropout_state)
    ctx.set_materialize_grads(False)


def _differentiate_blocks(
    ctx: Any,  # noqa: ANN401
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, places, bits, state = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    found = torch.ops.warploom.attention_blocks_backward(
        dout, dlse, q, k, v, out, lse, places, bits, *ctx.rest, state
    )
    needed = ctx.needs_input_grad
    every = (*found, *[None] * (len(needed) - 3))
    return tuple(one if need else None for one, need in zip(every, needed, strict=True))


register(
    "attention_blocks",
    Operands,
    MaskOfBlocks,
    BlocksFunction,
    Spec,
    Options,
    Dropout,
    returns="(Tensor, Tensor)",
    run=_attention_blocks,
    fake=_fake_attention,
    backward=_differentiate_blocks,
    save=_save_blocks,
)
register(
    "attention_blocks_backward",
    _Arriving,
    Operands,
    _Results,
    MaskOfBlocks,
    BlocksFunction,
    Spec,
    Options,
    Dropout,
    returns="(Tensor, Tensor, Tensor)",
    run=_attention_blocks_backward,
    fake=_fake_attention_backward,
    backward=gradient.refuse_second_derivative,
)
