"""The operators of attention that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. `causal` crosses
as the name of its alignment, "equal" being that of True; a window as its two bounds. The backward
pass is an operator too, so that a compiler sees what it reads and writes.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.operands import ordered_strides
from warploom.runtime.families.attention_backward.call import BackwardCall, prepare
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


class _Further(NamedTuple):
    """What joined later: tensors that results depend on beside q, k and v, and dropout_p.

    Graphs that were exported before do without: what joins these joins at the end, by default None.
    Torch leaves out the last ones that are None.
    """

    sinks: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None
    alibi_slopes: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None
    bias: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None
    mask: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None
    dropout_state: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None
    dropout_p: Annotated[float | None, "float?", "=None"] = None


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


_ALIGNMENTS: dict[bool | str, str | None] = {False: None, True: "equal"}


_TENSORS = _Further._fields[:-1]
_GIVEN = len(_Operands._fields) + len(_Function._fields)
_BEFORE_FURTHER = _GIVEN + len(_Spec._fields) + len(_Options._fields)


def _call(inputs: tuple[Any, ...], further: tuple[Any, ...]) -> AttentionCall:
    """The call that the arguments of _Operands, _Function and _Further stand for."""
    function = _Function(*inputs[3:])
    causal, left, right = function[:3]
    aligned: Any = causal == "equal" if causal in (None, "equal") else causal
    window = None if left is None and right is None else (left, right)
    q, k, v = inputs[:3]
    others: tuple[Any, ...] = function[3:]
    given = _Further(*further)
    dropped: dict[str, Any] = {"dropout_p": given.dropout_p or 0.0}
    return AttentionCall(q, k, v, aligned, window, *others, **(given._asdict() | dropped))


def _attention(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    spec, _, _, *further = inputs[_GIVEN:]  # how gradients are computed is no matter here
    call = _call(inputs[:_GIVEN], tuple(further))
    call.spec = spec
    with torch.no_grad():
        return attentions.attention(call)


def _attention_into(*inputs: Any) -> torch.Tensor:
    spec, result, *further = inputs[_GIVEN:]
    call = _call(inputs[:_GIVEN], tuple(further))
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
    prepare(made, tuple(n for n, one in zip(_TENSORS, wanted, strict=True) if one))
    return [*attention_backward(made), *made.further_gradients]


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
    count = len(_Function._fields)
    deterministic, spec, *further = rest[count:]
    call = _call((q, k, v, *rest[:count]), tuple(further))
    call.deterministic, call.backward_spec = deterministic, spec
    return BackwardCall(call, out, lse, dout, dlse)


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


def _fake_attention_backward_further(*given: Any) -> list[torch.Tensor]:
    wanted = _Wanted(*given[-len(_Wanted._fields) :])
    further = _Further(*given[-len(wanted) - len(_Further._fields) : -len(wanted)])[: len(wanted)]
    made = [
        torch.empty_like(one)
        for one, need in zip(further, wanted, strict=True)
        if need and isinstance(one, torch.Tensor)
    ]
    return [*_fake_attention_backward(*given), *made]


# ---- Autograd ------------------------------------------------------------------------------------


def _save(
    ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, torch.Tensor],
) -> None:
    q, k, v, *given = inputs
    count = len(_Function._fields)
    function, rest = _Function(*given[:count]), given[count:]
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
    if any(wanted):
        count = len(_Wanted._fields)
        asked = _Wanted(*wanted[:count], *[False] * (count - len(wanted)))
        found = torch.ops.warploom.attention_backward_further(*given, *asked)
    else:
        found = torch.ops.warploom.attention_backward(*given)
    first = (one if need else None for one, need in zip(found[:3], needed, strict=False))
    rest = iter(found[3:])
    last = (next(rest) if need else None for need in wanted)
    return (*first, *[None] * (_BEFORE_FURTHER - 3), *last)


register(
    "attention",
    _Operands,
    _Function,
    _Spec,
    _Options,
    _Further,
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
    _Further,
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
    _Further,
    returns="(Tensor, Tensor, Tensor)",
    run=_attention_backward,
    fake=_fake_attention_backward,
    backward=attention_gradient.refuse_second_derivative,
)


class _FurtherAsGiven(NamedTuple):
    """Those of _Further, where others follow."""

    sinks: Annotated[torch.Tensor | None, "Tensor?"]
    alibi_slopes: Annotated[torch.Tensor | None, "Tensor?"]
    bias: Annotated[torch.Tensor | None, "Tensor?"]
    mask: Annotated[torch.Tensor | None, "Tensor?"]
    dropout_state: Annotated[torch.Tensor | None, "Tensor?"]
    dropout_p: Annotated[float | None, "float?"]


register(
    "attention_backward_further",
    _Arriving,
    _Operands,
    _Results,
    _Function,
    _Options,
    _FurtherAsGiven,
    _Wanted,
    returns="Tensor[]",
    run=_attention_backward_further,
    fake=_fake_attention_backward_further,
    backward=attention_gradient.refuse_second_derivative,
)


def attention(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
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
    spec, further = _name(call.spec), call.further
    values: tuple[Any, ...] = ()
    if further:
        values = (*(further.get(name) for name in _TENSORS), call.dropout_p or None)
    out = call.out
    if out is None:
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.warploom.attention(
            *operands, *function, spec, call.deterministic, _name(call.backward_spec), *values
        )
        return result
    given = (*operands, out, *further.values())
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        attention_gradient.refuse_out()
    return out, torch.ops.warploom.attention_into(*operands, *function, spec, out, *values)


def _name(spec: KernelSpec | str | None) -> str | None:
    return spec.name if isinstance(spec, KernelSpec) else spec
