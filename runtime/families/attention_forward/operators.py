"""The operators of attention that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. `causal` crosses
as the name of its alignment, "equal" being that of True; a window as its two bounds. The backward
pass is an operator too, so that a compiler sees what it reads and writes.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.operands import ordered_strides
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_backward.plan import attention_backward
from warploom.runtime.families.attention_forward import gradient as attention_gradient
from warploom.runtime.families.attention_forward import plan as attentions
from warploom.runtime.families.attention_forward.call import AttentionCall
from warploom.runtime.operator import is_distributed, register


class _Operands(NamedTuple):
    q: Annotated[torch.Tensor, "Tensor"]
    k: Annotated[torch.Tensor, "Tensor"]
    v: Annotated[torch.Tensor, "Tensor"]


class _Function(NamedTuple):
    """What all operators take of a call beside q, k and v, each with its type in their schemas."""

    causal: Annotated[str | None, "str?"]
    left: Annotated[int | None, "SymInt?"]
    right: Annotated[int | None, "SymInt?"]
    softcap: Annotated[float | None, "float?"]
    scale: Annotated[float | None, "float?"]
    cu_seqlens_q: Annotated[torch.Tensor | None, "Tensor?"]
    cu_seqlens_k: Annotated[torch.Tensor | None, "Tensor?"]
    max_seqlen_q: Annotated[int | None, "SymInt?"]
    max_seqlen_k: Annotated[int | None, "SymInt?"]


class _Spec(NamedTuple):
    spec: Annotated[str | None, "str?"]


class _Into(NamedTuple):
    """Not called `out`: torch.compile refuses operators with a strided one."""

    result: Annotated[torch.Tensor, "Tensor(a!)"]


class _Options(NamedTuple):
    """How gradients are computed."""

    deterministic: Annotated[bool | None, "bool?"]
    backward_spec: Annotated[str | None, "str?"]


class _Arriving(NamedTuple):
    dout: Annotated[torch.Tensor, "Tensor"]
    dlse: Annotated[torch.Tensor | None, "Tensor?"]


class _Results(NamedTuple):
    out: Annotated[torch.Tensor, "Tensor"]
    lse: Annotated[torch.Tensor, "Tensor"]


_ALIGNMENTS: dict[bool | str, str | None] = {False: None, True: "equal"}


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> AttentionCall:
    """The call that the arguments of _Operands and _Function stand for."""
    function = _Function(*given)
    causal, left, right = function[:3]
    aligned: Any = causal == "equal" if causal in (None, "equal") else causal
    window = None if left is None and right is None else (left, right)
    return AttentionCall(q, k, v, aligned, window, *function[3:])


def _attention(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *given, spec, _, _ = inputs  # how gradients are computed is no matter here
    call = _call(*given)
    call.spec = spec
    with torch.no_grad():
        return attentions.attention(call)


def _attention_into(*inputs: Any) -> torch.Tensor:
    *given, spec, result = inputs
    call = _call(*given)
    call.spec, call.out = spec, result
    with torch.no_grad():
        return attentions.attention(call)[1]


def _attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *function, deterministic, spec = rest
    call = _call(q, k, v, *function)
    call.deterministic, call.backward_spec = deterministic, spec
    return attention_backward(BackwardCall(call, out, lse, dout, dlse))


# ---- Without data --------------------------------------------------------------------------------


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty_strided(tensor.shape, ordered_strides(tensor))


def _fake_attention(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(q), _fake_attention_into(q, *rest)


def _fake_attention_into(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
    return q.new_empty(shape, dtype=torch.float32)


def _fake_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _like(q), _like(k), _like(v)


# ---- Autograd ------------------------------------------------------------------------------------


def _save(
    ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, torch.Tensor],
) -> None:
    q, k, v, *given, _, deterministic, backward_spec = inputs
    function = _Function(*given)
    ctx.save_for_backward(q, k, v, *output, function.cu_seqlens_q, function.cu_seqlens_k)
    ctx.set_materialize_grads(False)
    # Lengths that were found equal stay so, even if cu_seqlens comes back as two tensors.
    causal = "bottom_right" if function.causal == "equal" else function.causal
    ctx.function = function._replace(causal=causal, cu_seqlens_q=None, cu_seqlens_k=None)
    ctx.options = (deterministic, backward_spec)


def _differentiate(
    ctx: Any,  # noqa: ANN401
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    function = ctx.function._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    found = torch.ops.warploom.attention_backward(
        dout, dlse, q, k, v, out, lse, *function, *ctx.options
    )
    needed = ctx.needs_input_grad
    return tuple(
        one if need else None
        for one, need in zip((*found, *[None] * (len(needed) - 3)), needed, strict=True)
    )


register(
    "attention",
    _Operands,
    _Function,
    _Spec,
    _Options,
    returns="(Tensor, Tensor)",
    run=_attention,
    fake=_fake_attention,
    backward=_differentiate,
    save=_save,
)
register(
    "attention_into",
    _Operands,
    _Function,
    _Spec,
    _Into,
    returns="Tensor",
    run=_attention_into,
    fake=_fake_attention_into,
)
register(
    "attention_backward",
    _Arriving,
    _Operands,
    _Results,
    _Function,
    _Options,
    returns="(Tensor, Tensor, Tensor)",
    run=_attention_backward,
    fake=_fake_attention_backward,
    backward=attention_gradient.refuse_second_derivative,
)


def attention(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a call as an operator, for a compiler to trace; return out and lse."""
    if is_distributed(call.q):
        from warploom.runtime.families.attention_forward import sharding  # noqa: F401 (registers)
    left, right = call.window or (None, None)
    operands = (call.q, call.k, call.v)
    causal: Any = _ALIGNMENTS.get(call.causal, call.causal)
    function = _Function(
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
    spec = _name(call.spec)
    out = call.out
    if out is None:
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.warploom.attention(
            *operands, *function, spec, call.deterministic, _name(call.backward_spec)
        )
        return result
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*operands, out)):
        attention_gradient.refuse_out()
    return out, torch.ops.warploom.attention_into(*operands, *function, spec, out)


def _name(spec: KernelSpec | str | None) -> str | None:
    return spec.name if isinstance(spec, KernelSpec) else spec
