"""Attention of q, k and v that may lie in one tensor, whose gradient is then one tensor, too.

torch differentiates a view by itself, and puts the gradients of three views together by a copy.
Here the kernel writes each where it belongs. A compiled graph keeps torch's way.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_forward.api import attention
from warploom.runtime.families.attention_forward.gradient import gradients, refuse_second_derivative
from warploom.runtime.tensors import lowered

Tensors = tuple[torch.Tensor, ...]  # (q, k, v), (q, kv) or (qkv,)
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")


def attend(tensors: Tensors, keywords: dict[str, Any]) -> Pair:
    """Return out and lse as `warploom.attention` has them, of tensors in FlashAttention's layouts.

    `keywords` are those of `warploom.attention`; with cu_seqlens the tensors are
    [total, .., heads, dim], without [batch, seq, .., heads, dim].
    """
    if not _written_together(tensors):
        q, k, v = _views(tensors, keywords)
        pair: Pair = attention(q, k, v, return_lse=True, **keywords)
        return pair
    if torch._C._is_any_autocast_enabled():
        tensors = tuple(lowered(tensor) for tensor in tensors)
    found: Pair = _Packed.apply(keywords, *tensors)  # type: ignore[no-untyped-call]
    return found


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


def _views(tensors: Tensors, keywords: dict[str, Any]) -> Three:
    """q, k and v as `warploom.attention` takes them, or their gradients: views, never copies."""
    q, k, v = tensors if len(tensors) == 3 else (*tensors[:-1], *tensors[-1].unbind(-3))
    if "cu_seqlens_q" in keywords:
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
        q, k, v = _views(tensors, keywords)
        out, lse = attention(q, k, v, return_lse=True, **keywords)
        offsets = [keywords[name] for name in _OFFSETS if name in keywords]
        ctx.save_for_backward(*tensors, out, lse, *offsets)
        ctx.set_materialize_grads(False)
        ctx.packed = len(tensors)
        ctx.keywords = {name: one for name, one in keywords.items() if name not in _OFFSETS}
        return out, lse

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the tensors, each where it is wanted."""
        saved = ctx.saved_tensors
        tensors, (out, lse, *offsets) = saved[: ctx.packed], saved[ctx.packed :]
        keywords = {**ctx.keywords, **dict(zip(_OFFSETS, offsets, strict=False))}
        run = _Gradients.apply if torch.is_grad_enabled() else _gradients  # create_graph=True
        found = run(keywords, out, lse, dout, dlse, *tensors)
        needed = ctx.needs_input_grad[1:]
        return None, *(one if need else None for one, need in zip(found, needed, strict=True))


class _Gradients(torch.autograd.Function):
    """The backward pass where it might be differentiated: which it cannot be."""

    @staticmethod
    def forward(ctx: object, *given: Any) -> Tensors:
        return _gradients(*given)

    @staticmethod
    def backward(ctx: object, *_: object) -> NoReturn:
        """Refuse."""
        refuse_second_derivative()


def _gradients(
    keywords: dict[str, Any],
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    *tensors: torch.Tensor,
) -> Tensors:
    """The gradients of packed tensors, contiguous; None stands for a gradient of zeros."""
    into = tuple(tensor.new_empty(tensor.shape) for tensor in tensors)
    forward = Arguments(*_views(tensors, keywords), **keywords)
    gradients(forward, out, lse, dout, dlse, into=_views(into, keywords))
    return into
