"""The operators of attention with a mask of blocks, for torch.compile: as those of operators.py.

The mask crosses as its tensors and sizes. Kernels' lists are known by the tensor of its places, so
that an operator finds those that were made for the mask itself.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.block_mask import BlockMask
from warploom.runtime.families._attention.mask import refuse_beside_blocks
from warploom.runtime.families._attention.operands import ordered_strides
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_backward.plan import attention_backward
from warploom.runtime.families.attention_forward import gradient, plan
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.operator import register


class _Operands(NamedTuple):
    q: Annotated[torch.Tensor, "Tensor"]
    k: Annotated[torch.Tensor, "Tensor"]
    v: Annotated[torch.Tensor, "Tensor"]


class _Mask(NamedTuple):
    places: Annotated[torch.Tensor, "Tensor"]
    bits: Annotated[torch.Tensor, "Tensor"]
    block_q: Annotated[int, "int"]
    block_kv: Annotated[int, "int"]


class _Function(NamedTuple):
    softcap: Annotated[float | None, "float?"]
    scale: Annotated[float | None, "float?"]


class _Options(NamedTuple):
    spec: Annotated[str | None, "str?"]
    deterministic: Annotated[bool | None, "bool?"]
    backward_spec: Annotated[str | None, "str?"]


class _Dropout(NamedTuple):
    dropout_p: Annotated[float | None, "float?", "=None"] = None
    dropout_state: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None


class _Arriving(NamedTuple):
    dout: Annotated[torch.Tensor, "Tensor"]
    dlse: Annotated[torch.Tensor | None, "Tensor?"]


class _Results(NamedTuple):
    out: Annotated[torch.Tensor, "Tensor"]
    lse: Annotated[torch.Tensor, "Tensor"]


_BEFORE_DROPOUT = len(_Mask._fields) + len(_Function._fields) + len(_Options._fields)


def _mask(q: torch.Tensor, k: torch.Tensor, *given: Any) -> BlockMask:
    places, bits, block_q, block_kv = _Mask(*given)
    return BlockMask(places, bits, (block_q, block_kv), q.shape[2], k.shape[2])


def _told(given: tuple[Any, ...]) -> tuple[_Options, dict[str, Any]]:
    """Of what follows q, k and v: the options, and what both passes are told beside the mask."""
    dropout_p, dropout_state = _Dropout(*given[_BEFORE_DROPOUT:])  # the last of None are left out
    told = _Function(*given[4:6])._asdict()
    told |= {"dropout_p": dropout_p or 0.0, "dropout_state": dropout_state}
    return _Options(*given[6:_BEFORE_DROPOUT]), told


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> Pair:
    mask, (options, told) = _mask(q, k, *given[:4]), _told(given)
    with torch.no_grad():
        return plan.attention(AttentionCall(q, k, v, spec=options.spec, block_mask=mask, **told))


def _attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask, (options, told) = _mask(q, k, *given[:4]), _told(given)
    forward = Arguments(
        q,
        k,
        v,
        deterministic=options.deterministic,
        backward_spec=options.backward_spec,
        block_mask=mask,
        **told,
    )
    return attention_backward(BackwardCall(forward, out, lse, dout, dlse))


# ---- Without data --------------------------------------------------------------------------------


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty_strided(tensor.shape, ordered_strides(tensor))


def _fake_attention(q: torch.Tensor, *_: object) -> Pair:
    return _like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _fake_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _like(q), _like(k), _like(v)


# ---- Autograd ------------------------------------------------------------------------------------


def _save(
    ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
    inputs: tuple[Any, ...],
    output: Pair,
) -> None:
    q, k, v, places, bits, *rest = inputs
    dropped = _Dropout(*rest[_BEFORE_DROPOUT - 2 :])
    ctx.rest = (*rest[: _BEFORE_DROPOUT - 2], dropped.dropout_p)
    ctx.save_for_backward(q, k, v, *output, places, bits, dropped.dropout_state)
    ctx.set_materialize_grads(False)


def _differentiate(
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
    _Operands,
    _Mask,
    _Function,
    _Options,
    _Dropout,
    returns="(Tensor, Tensor)",
    run=_attention,
    fake=_fake_attention,
    backward=_differentiate,
    save=_save,
)
register(
    "attention_blocks_backward",
    _Arriving,
    _Operands,
    _Results,
    _Mask,
    _Function,
    _Options,
    _Dropout,
    returns="(Tensor, Tensor, Tensor)",
    run=_attention_backward,
    fake=_fake_attention_backward,
    backward=gradient.refuse_second_derivative,
)


def attention(call: AttentionCall) -> Pair:
    """Run a call with a mask of blocks as an operator, for a compiler to trace."""
    mask: BlockMask = call.block_mask
    refuse_beside_blocks(call)
    operands = (call.q, call.k, call.v)
    wanted = torch.is_grad_enabled() and any(one.requires_grad for one in operands)
    if wanted and call.out is not None:
        gradient.refuse_out()
    found: Pair = torch.ops.warploom.attention_blocks(
        *operands,
        mask.places,
        mask.bits,
        *mask.block,
        call.softcap,
        call.scale,
        _name(call.spec),
        call.deterministic,
        _name(call.backward_spec),
        call.dropout_p or None,
        call.dropout_state if call.dropout_p else None,
    )
    return found if call.out is None else (call.out.copy_(found[0]), found[1])


def _name(spec: KernelSpec | str | None) -> str | None:
    return spec.name if isinstance(spec, KernelSpec) else spec
