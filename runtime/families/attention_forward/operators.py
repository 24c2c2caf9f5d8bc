"""The operators of attention that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. `causal` crosses
as the name of its alignment, "equal" being that of True; a window as its two bounds.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.operands import empty_like
from warploom.runtime.families.attention_forward import gradient as attention_gradient
from warploom.runtime.families.attention_forward import plan as attentions
from warploom.runtime.families.attention_forward.backward_operators import gradients
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.families.attention_forward.operator_arguments import (
    TENSORS,
    Function,
    Further,
    Operands,
    Options,
    call_of,
)
from warploom.runtime.operator import is_distributed, register


class _Spec(NamedTuple):
    spec: Annotated[str | None, "str?"]


class _Into(NamedTuple):
    """Not called `out`: torch.compile refuses operators with a strided one."""

    result: Annotated[torch.Tensor, "Tensor(a!)"]


_ALIGNMENTS: dict[bool | str, str | None] = {False: None, True: "equal"}
_GIVEN = len(Operands._fields) + len(Function._fields)
_BEFORE_FURTHER = _GIVEN + len(_Spec._fields) + len(Options._fields)


def _attention(*inputs: Any) -> Pair:
    spec, _, _, *further = inputs[_GIVEN:]  # how gradients are computed is no matter here
    call = call_of(inputs[:_GIVEN], tuple(further))
    call.spec = spec
    with torch.no_grad():
        return attentions.attention(call)


def _attention_into(*inputs: Any) -> torch.Tensor:
    spec, result, *further = inputs[_GIVEN:]
    call = call_of(inputs[:_GIVEN], tuple(further))
    call.spec, call.out = spec, result
    with torch.no_grad():
        return attentions.attention(call)[1]


# ---- Without data --------------------------------------------------------------------------------


def _fake_attention(q: torch.Tensor, *rest: Any) -> Pair:
    return empty_like(q), _fake_attention_into(q, *rest)


def _fake_attention_into(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
    return q.new_empty(shape, dtype=torch.float32)


# ---- Autograd ------------------------------------------------------------------------------------


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
    found = gradients(given, wanted)
    first = (one if need else None for one, need in zip(found[:3], needed, strict=False))
    rest = iter(found[3:])
    last = (next(rest) if need else None for need in wanted)
    return (*first, *[None] * (_BEFORE_FURTHER - 3), *last)


register(
    "attention",
    Operands,
    Function,
    _Spec,
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
    _Spec,
    _Into,
    Further,
    returns="Tensor",
    run=_attention_into,
    fake=_fake_attention_into,
)


def attention(call: AttentionCall) -> Pair:
    """Run a call as an operator, for a compiler to trace; return out and lse."""
    if is_distributed(call.q):
        if call.further:
            raise ProblemError(
                f"{' and '.join(call.further)} with distributed tensors",
                rule="must be left out: no rule says how they are split",
                fix="call it on the local shards, of heads or of the batch",
            )
        from warploom.runtime.families.attention_forward import sharding  # noqa: F401 (registers)
    if call.block_mask is not None:
        # It registers operators of its own, which few programs need.
        from warploom.runtime.families.attention_forward import block_operators

        return block_operators.attention(call)
    left, right = call.window or (None, None)
    operands = (call.q, call.k, call.v)
    causal: Any = _ALIGNMENTS.get(call.causal, call.causal)
    function = Function(
        causal,
        left,
        right,
        call.softcap,
        call.scale,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_seqlen_q,
        call.max_seqlen_k,
    )
    spec, further = _name(call.spec), call.further
    values: tuple[Any, ...] = ()
    if further:
        values = (*(further.get(name) for name in TENSORS), call.dropout_p or None)
    out = call.out
    if out is None:
        result: Pair = torch.ops.warploom.attention(
            *operands, *function, spec, call.deterministic, _name(call.backward_spec), *values
        )
        return result
    given = (*operands, out, *further.values())
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        attention_gradient.refuse_out()
    return out, torch.ops.warploom.attention_into(*operands, *function, spec, out, *values)


def _name(spec: KernelSpec | str | None) -> str | None:
    return spec.name if isinstance(spec, KernelSpec) else spec
