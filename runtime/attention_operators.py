"""The operators of attention that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. `causal` crosses
as the name of its alignment, "equal" being that of True; a window as its two bounds. The backward
pass is an operator too, so that a compiler sees what it reads and writes.
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime import attention as attentions
from warploom.runtime import attention_gradient
from warploom.runtime.attention_backward import attention_backward
from warploom.runtime.attention_backward_problem import BackwardCall
from warploom.runtime.attention_operands import ordered_strides
from warploom.runtime.attention_problem import Call

_FUNCTION = (
    "str? causal, SymInt? left, SymInt? right, float? softcap, float? scale, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k"
)
_OPERANDS = "Tensor q, Tensor k, Tensor v"
_OPTIONS = "bool? deterministic, str? backward_spec"

_library: Any = torch.library.Library("warploom", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"attention({_OPERANDS}, {_FUNCTION}, str? spec, {_OPTIONS}) -> (Tensor, Tensor)")
# Not called `out`: torch.compile refuses operators with a strided one.
_library.define(f"attention_into({_OPERANDS}, {_FUNCTION}, str? spec, Tensor(a!) result) -> Tensor")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, {_OPERANDS}, Tensor out, Tensor lse, "
    f"{_FUNCTION}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)

_ALIGNMENTS: dict[bool | str, str | None] = {False: None, True: "equal"}


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *function: Any) -> Call:
    """The call that the arguments of _OPERANDS and _FUNCTION stand for."""
    causal, left, right, softcap, scale, *lengths = function
    aligned: Any = causal == "equal" if causal in (None, "equal") else causal
    window = None if left is None and right is None else (left, right)
    return Call(q, k, v, aligned, window, softcap, scale, *lengths)


def _attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *given, spec, _, _ = arguments  # how gradients are computed is no matter here
    call = _call(*given)
    call.spec = spec
    with torch.no_grad():
        return attentions.attention(call)


def _attention_into(*arguments: Any) -> torch.Tensor:
    *given, spec, result = arguments
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


for _key in ("CUDA", "CPU"):
    _library.impl("attention", _attention, _key)
    _library.impl("attention_into", _attention_into, _key)
    _library.impl("attention_backward", _attention_backward, _key)


# ---- Without data --------------------------------------------------------------------------------


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty_strided(tensor.shape, ordered_strides(tensor))


@torch.library.register_fake("warploom::attention", lib=_library)  # type: ignore[untyped-decorator]
def _fake_attention(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(q), _fake_attention_into(q, *rest)


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "warploom::attention_into", lib=_library
)
def _fake_attention_into(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
    return q.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "warploom::attention_backward", lib=_library
)
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
    q, k, v, *function, _, deterministic, backward_spec = inputs
    causal, *numbers, offsets_q, offsets_k, longest_q, longest_k = function
    ctx.save_for_backward(q, k, v, *output, offsets_q, offsets_k)
    ctx.set_materialize_grads(False)
    # Lengths that were found equal stay so, even if cu_seqlens comes back as two tensors.
    ctx.numbers = ("bottom_right" if causal == "equal" else causal, *numbers)
    ctx.longest = (longest_q, longest_k)
    ctx.options = (deterministic, backward_spec)


def _differentiate(
    ctx: Any,  # noqa: ANN401
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, *offsets = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    function = (*ctx.numbers, *offsets, *ctx.longest)
    found = torch.ops.warploom.attention_backward(
        dout, dlse, q, k, v, out, lse, *function, *ctx.options
    )
    needed = ctx.needs_input_grad
    return tuple(
        one if need else None
        for one, need in zip((*found, *[None] * (len(needed) - 3)), needed, strict=True)
    )


torch.library.register_autograd(
    "warploom::attention", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd(
    "warploom::attention_backward", attention_gradient.refuse_second_derivative, lib=_library
)


def attention(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a call as an operator, for a compiler to trace; return out and lse."""
    left, right = call.window or (None, None)
    operands = (call.q, call.k, call.v)
    function = (
        *(_ALIGNMENTS.get(call.causal, call.causal), left, right, call.softcap, call.scale),
        *(call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k),
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
