"""Attention of operands in 16 bits that are quantized to 8 bits first, and its gradients."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch.autograd.function import once_differentiable

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.runtime.families._attention.problem import Alignment, Arguments, Keywords, Window
from warploom.runtime.families.attention_forward import gradient
from warploom.runtime.families.attention_forward.api import attention
from warploom.runtime.families.attention_quantize.api import (
    QuantizedAttention,
    attention_quantize,
    dequantize,
)
from warploom.runtime.tensors import lowered, require_tensors


class _Options(NamedTuple):
    """What a call is given beside tensors."""

    scores: str
    smooth: bool
    keywords: Keywords


class _Keywords(TypedDict, total=False):
    """What a call may be given beside its operands and `return_lse`, for the overloads."""

    scores: str
    smooth: bool | None
    causal: bool | Alignment
    window: Window | None
    softcap: float | None
    scale: float | None


@overload
def attention_8bit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> torch.Tensor: ...


@overload
def attention_8bit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_8bit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scores: str = "int8",
    smooth: bool | None = None,
    causal: bool | Alignment = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return attention of q, k and v that are quantized to 8 bits first.

    Args:
        q: [batch, heads, seq_q, dim], fp16 or bf16, as `warploom.attention` takes it.
        k: [batch, kv_heads, seq_k, dim].
        v: Of the shape of k.
        scores: The type of the quantized q and k: "int8", the more exact one, or "e4m3".
        smooth: Subtract the mean of k over its keys first. None: without a softcap, which changes
            scores by what they are as a whole.
        causal: As for `warploom.attention`; so are window, softcap and scale.
        window: A row attends to so many columns on each side of the diagonal.
        softcap: Scores become softcap tanh(score / softcap).
        scale: What scores are multiplied by, dim ** -0.5 by default.
        return_lse: Return the log-sum-exp of each row's scores, too, which has no gradient.

    Returns:
        The result in the type of q, and the log-sum-exp with `return_lse`.

    Gradients are those of the kernel in 16 bits on what the quantized operands stand for, and
    pass their rounding as if it were none (straight-through). The operands are kept in 8 bits for
    that.

    Raises:
        ProblemError: Before anything is launched.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 64).bfloat16() for _ in range(3))
        >>> warploom.attention_8bit(q, k, v, causal=True).dtype
        torch.bfloat16
    """
    require_boolean("return_lse", return_lse)
    if not torch.compiler.is_compiling():
        named = (("q", q), ("k", k), ("v", v))
        require_tensors("warploom.attention_8bit", named, [name for name, _ in named])
    if smooth and softcap:
        raise ProblemError(
            f"smooth with softcap {softcap}",
            rule="must be False: a softcap depends on whole scores",
            fix="leave smooth out",
        )
    keywords: Keywords = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
    if torch._C._is_any_autocast_enabled():
        q, k, v = lowered(q), lowered(k), lowered(v)
    options = _Options(scores, not softcap if smooth is None else smooth, keywords)
    out, lse = _Attention8Bit.apply(options, q, k, v)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class _Attention8Bit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        options: _Options,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = q.detach(), k.detach(), v.detach()
        quantized = attention_quantize(q, k, v, scores=options.scores, smooth=options.smooth)
        out, lse = _attended(quantized, q.dtype, **options.keywords)
        ctx.save_for_backward(*quantized[:6], out, lse)
        ctx.options, ctx.keys = options, k.shape[2]
        ctx.set_materialize_grads(False)
        if quantized.score_shift is not None:
            scale = options.keywords["scale"]
            lse = lse + (q.shape[-1] ** -0.5 if scale is None else scale) * quantized.score_shift
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, _: object) -> tuple[Any, ...]:  # noqa: ANN401
        """Return the gradients of what the quantized operands stand for.

        k is less its mean there, and the log-sum-exp likewise: differences from it, which weights
        are made of, are the same, and the gradients with them.
        """
        if dout is None:
            return None, None, None, None
        q, k, v, q_descale, k_descale, v_descale, out, lse = ctx.saved_tensors
        kept = QuantizedAttention(q, k, v, q_descale, k_descale, v_descale, None, None)
        operands = dequantize(kept, ctx.keys, out.dtype)
        call = Arguments(*operands, **ctx.options.keywords)
        asked, numbers = gradient.Asked.of(call), gradient.numbers_of(call)
        found = gradient.differentiate(asked, numbers, dout, None, *operands, out, lse)
        return None, *found[:3]


def _attended(
    quantized: QuantizedAttention, dtype: torch.dtype, **keywords: Unpack[Keywords]
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention(
        quantized.q,
        quantized.k,
        quantized.v,
        q_descale=quantized.q_descale,
        k_descale=quantized.k_descale,
        v_descale=quantized.v_descale,
        v_layout="dim_major",
        out_dtype=dtype,
        return_lse=True,
        **keywords,
    )
