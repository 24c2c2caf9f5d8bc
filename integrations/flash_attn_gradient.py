"""Attention of q, k and v that may lie in one tensor, whose gradient is then one tensor, too.

torch differentiates a view by itself, and puts the gradients of three views together by a copy.
Here the kernel writes each where it belongs, and results lie as FlashAttention's do: a call takes
no views that autograd has to know of. A compiled graph keeps torch's way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from warploom.runtime.families.attention_forward import gradient
from warploom.runtime.families.attention_forward.api import attention
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.families.attention_forward.gradient import (
    Asked,
    Numbers,
    differentiate,
    refuse_second_derivative,
)
from warploom.runtime.families.attention_forward.plan import AttentionPlan
from warploom.runtime.function import WarmCalls
from warploom.runtime.plan import planned
from warploom.runtime.tensors import WithoutMemoryError, explained, lowered

Tensors = tuple[torch.Tensor, ...]  # (q, k, v), (q, kv) or (qkv,)
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_IN_MEMORY = (torch.Tensor, torch.nn.Parameter)


class FlashLayout:
    """What is changed in a call whose result is [batch, seq, heads, dim].

    It shares plans with calls whose result is [batch, heads, seq, dim].
    """

    __slots__ = ()

    def results(self, details: Any) -> Pair:  # noqa: ANN401 (of the call)
        """New ones, of which `out` lies as the other's does."""
        q: torch.Tensor = self.q  # type: ignore[attr-defined]
        batch, heads, rows, dim = details.out_strides
        size = (q.shape[0], q.shape[2], q.shape[1], q.shape[3])
        out = q.new_empty_strided(size, (batch, rows, heads, dim))
        return out, q.new_empty(details.sizes.lse_shape, dtype=torch.float32)

    def compute(self, details: Any, results: Pair) -> None:  # noqa: ANN401
        """Write them by plain torch operations."""
        out, lse = results
        super().compute(details, (out.transpose(1, 2), lse))  # type: ignore[misc]


@dataclass(slots=True)
class FlashCall(FlashLayout, AttentionCall):
    """An attention whose result is [batch, seq, heads, dim]."""


def call_of(tensors: Tensors, keywords: dict[str, Any]) -> AttentionCall:
    """The call of tensors in FlashAttention's layouts, with keywords of `warploom.attention`."""
    is_packed = "cu_seqlens_q" in keywords
    kind = AttentionCall if is_packed else FlashCall
    return kind(*_views(tensors, packed=is_packed), **keywords)


class Warm:
    """The calls of one function of FlashAttention's with q, k and v that ran before.

    names     of its arguments, as `warploom.attention` calls its tensors and numbers
    keywords  those of `warploom.attention`, of the arguments behind q, k and v
    """

    def __init__(self, names: Sequence[str], keywords: Callable[..., dict[str, Any]]) -> None:
        self._names = names
        self._calls: WarmCalls[Pair] = WarmCalls(
            names,
            AttentionCall.declaration,
            lambda values: call_of(values[:3], keywords(*values[3:])),
        )
        self.again = self._calls.again

    def keep(
        self, values: tuple[Any, ...], call: AttentionCall, plan: AttentionPlan, results: Pair
    ) -> None:
        """Keep what is known of a call, for others like it."""
        is_derived = results[0].requires_grad
        derive = gradient.derive(call, self._names, _apply) if is_derived else None
        self._calls.keep(values, call, plan, results, derive)


def attend(
    tensors: Tensors,
    keywords: dict[str, Any],
    keep: Callable[[AttentionCall, AttentionPlan, Pair], None] | None = None,
) -> Pair:
    """Return out, as q lies, and lse, as `warploom.attention` has it, in FlashAttention's layouts.

    `keywords` are those of `warploom.attention`; with cu_seqlens the tensors are
    [total, .., heads, dim], without [batch, seq, .., heads, dim]. `keep` is told of a call that is
    launched as it stands.
    """
    # With dropout, whose state is drawn within, and kept there for the gradients.
    if "dropout_p" in keywords or not _is_launchable(tensors):
        return _traced(tensors, keywords)
    if torch._C._is_any_autocast_enabled():
        tensors = tuple(lowered(tensor) for tensor in tensors)
    call = call_of(tensors, keywords)
    try:
        plan = planned(call, AttentionPlan)
        with torch.no_grad():
            results = plan.run(call)
    except WithoutMemoryError:
        return _traced(tensors, keywords)
    except Exception as error:
        raise explained(error, call.require) from error.__cause__
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        read = [one for _, one in call.read()[3:]]  # behind q, k and v
        results = _apply(Asked.of(call), gradient.numbers_of(call), results, *tensors, *read)
    if keep is not None:
        keep(call, plan, results)
    return results


def _traced(tensors: Tensors, keywords: dict[str, Any]) -> Pair:
    """The results where operators are seen."""
    is_packed = "cu_seqlens_q" in keywords
    q, k, v = _views(tensors, packed=is_packed)
    out, lse = attention(q, k, v, return_lse=True, **keywords)
    return (out if is_packed else out.transpose(1, 2)), lse


def _is_launchable(tensors: Tensors) -> bool:
    """Whether the call is computed now, rather than traced or transformed."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(tensor) in _IN_MEMORY for tensor in tensors)


def _views(tensors: Tensors, *, packed: bool) -> Three:
    """q, k and v as `warploom.attention` takes them, or their gradients: views, never copies."""
    q, k, v = tensors if len(tensors) == 3 else (*tensors[:-1], *tensors[-1].unbind(-3))
    if packed:
        return q, k, v
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class _Flash(torch.autograd.Function):
    """out and lse of tensors in FlashAttention's layouts, differentiable in these."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        asked: Asked,
        numbers: Numbers,
        results: Pair,
        *read: torch.Tensor,
    ) -> Pair:
        count = len(read) - 2 * (asked.offsets > 0) - len(asked.further)  # of tensors in layouts
        ctx.save_for_backward(*read[:count], *results, *read[count:])
        ctx.set_materialize_grads(False)
        ctx.asked, ctx.numbers, ctx.count = asked, numbers, count
        return results

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the tensors, each where it is wanted."""
        saved, count = ctx.saved_tensors, ctx.count
        run = _once if torch.is_grad_enabled() else _gradients  # create_graph=True
        found = run(ctx.asked, ctx.numbers, dout, dlse, saved[count:], *saved[:count])
        needed = ctx.needs_input_grad[3:]
        rest = [None] * (len(needed) - count)
        wanted = [one if need else None for one, need in zip(found, needed, strict=False)]
        return None, None, None, *wanted, *rest


# Function.apply itself only adds what torch.func asks for, whose tensors do not come here.
_apply: Callable[..., Pair] = super(torch.autograd.Function, _Flash).apply


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
    """The gradients of the tensors, contiguous where they are packed; None stands for zeros.

    results   out, lse, and what else was read: offsets, slopes
    """
    is_packed = asked.offsets > 0
    out, *rest = results
    if not is_packed:
        out = out.transpose(1, 2)
        dout = None if dout is None else dout.transpose(1, 2)
    saved = (*_views(tensors, packed=is_packed), out, *rest)
    if len(tensors) == 3:
        found = differentiate(asked, numbers, dout, dlse, *saved)
        return found if is_packed else tuple([one.transpose(1, 2) for one in found])
    into = tuple([tensor.new_empty(tensor.shape) for tensor in tensors])
    differentiate(asked, numbers, dout, dlse, *saved, into=_views(into, packed=is_packed))
    return into
