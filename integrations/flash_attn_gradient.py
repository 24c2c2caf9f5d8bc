"""Attention of q, k and v that may lie in one tensor, whose gradient is then one tensor, too.

torch differentiates a view by itself, and puts the gradients of three views together by a copy.
Here the kernel writes each where it belongs. A compiled graph keeps torch's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_forward.api import attention
from warploom.runtime.families.attention_forward.gradient import (
    Asked,
    Numbers,
    differentiate,
    refuse_second_derivative,
)
from warploom.runtime.tensors import lowered

Tensors = tuple[torch.Tensor, ...]  # (q, k, v), (q, kv) or (qkv,)
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
_FURTHER = ("alibi_slopes",)  # what else scores depend on


def attend(tensors: Tensors, keywords: dict[str, Any]) -> Pair:
    """Return out and lse as `warploom.attention` has them, of tensors in FlashAttention's layouts.

    `keywords` are those of `warploom.attention`; with cu_seqlens the tensors are
    [total, .., heads, dim], without [batch, seq, .., heads, dim].
    """
    # Whose state is drawn within, and kept there for the gradients.
    dropped = "dropout_p" in keywords
    if dropped or not _written_together(tensors):
        q, k, v = _views(tensors, packed="cu_seqlens_q" in keywords)
        pair: Pair = attention(q, k, v, return_lse=True, **keywords)
        return pair
    if torch._C._is_any_autocast_enabled():
        tensors = tuple(lowered(tensor) for tensor in tensors)
    return _apply(keywords, *tensors)


def _written_together(tensors: Tensors) -> bool:
    """Whether gradients of packed tensors are wanted, and computed now rather than traced."""
    if len(tensors) == 3 or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
    return plain and any(tensor.requires_grad for tensor in tensors)


def _views(tensors: Tensors, *, packed: bool) -> Three:
    """q, k and v as `warploom.attention` takes them, or their gradients: views, never copies."""
    q, k, v = tensors if len(tensors) == 3 else (*tensors[:-1], *tensors[-1].unbind(-3))
    if packed:
        return q, k, v
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class _Packed(torch.autograd.Function):
    """out and lse of packed tensors, differentiable in these."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        keywords: dict[str, Any],
        *tensors: torch.Tensor,
    ) -> Pair:
        packed = "cu_seqlens_q" in keywords
        q, k, v = _views(tensors, packed=packed)
        out, lse = attention(q, k, v, return_lse=True, **keywords)
        read = [keywords[name] for name in _OFFSETS] if packed else []
        read += [keywords[name] for name in _FURTHER if name in keywords]
        ctx.save_for_backward(*tensors, out, lse, *read)
        ctx.set_materialize_grads(False)
        ctx.count, ctx.asked = len(tensors), Asked.of(Arguments(q, k, v, **keywords))
        ctx.numbers = (keywords["scale"], keywords["softcap"], 0.0)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the tensors, each where it is wanted."""
        saved = ctx.saved_tensors
        tensors, results = saved[: ctx.count], saved[ctx.count :]
        run = _once if torch.is_grad_enabled() else _gradients  # create_graph=True
        found = run(ctx.asked, ctx.numbers, dout, dlse, results, *tensors)
        needed = ctx.needs_input_grad[1:]
        return None, *[one if need else None for one, need in zip(found, needed, strict=True)]


# Function.apply itself only adds what torch.func asks for, whose tensors do not come here.
_apply: Callable[..., Pair] = super(torch.autograd.Function, _Packed).apply


class _Once(torch.autograd.Function):
    """The backward pass where it might be differentiated: which it cannot be."""

    @staticmethod
    def forward(ctx: object, *given: Any) -> Tensors:
        return _gradients(*given)

    @staticmethod
    def backward(ctx: object, *_: object) -> NoReturn:
        """Refuse."""
        refuse_second_derivative()


_once: Callable[..., Tensors] = _Once.apply


def _gradients(
    asked: Asked,
    numbers: Numbers,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    results: Tensors,
    *tensors: torch.Tensor,
) -> Tensors:
    """The gradients of packed tensors, contiguous; None stands for a gradient of zeros.

    results   out, lse, and what else was read: offsets, slopes
    """
    packed = asked.offsets > 0
    into = tuple([tensor.new_empty(tensor.shape) for tensor in tensors])
    saved = (*_views(tensors, packed=packed), *results)
    differentiate(asked, numbers, dout, dlse, *saved, into=_views(into, packed=packed))
    return into
