"""What users call: `warploom.attention` and `warploom.plan_attention`."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import torch
from torch.autograd import forward_ad

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.problem import Alignment, Keywords, Window
from warploom.runtime.families.attention_forward import operator_call
from warploom.runtime.families.attention_forward import operators as _operators  # noqa: F401 (registers)
from warploom.runtime.families.attention_forward import plan as plans
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.families.attention_forward.eight_bit_call import (
    EightBitCall,
    EightBitKeywords,
    Sums,
    ValueLayout,
    call_of,
)
from warploom.runtime.families.attention_forward.plan import AttentionPlan
from warploom.runtime.function import Function
from warploom.runtime.plan import planned
from warploom.runtime.tensors import WithoutMemoryError, explained, lowered


class AttentionKeywords(Keywords, EightBitKeywords, total=False):
    """The keywords of `warploom.attention`, for its overloads."""


_eight_bits: Function[Pair] = Function("attention_eight_bits", EightBitCall)
_warm = plans.calls()


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[AttentionKeywords],
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[AttentionKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **keywords: Unpack[AttentionKeywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | Alignment = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
    deterministic: bool | None = None,
    backward_spec: KernelSpec | str | None = None,
    sinks: torch.Tensor | None = None,
    block_mask: object = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_state: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    v_layout: ValueLayout = "keys",
    sums: Sums | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return exact attention, softmax(scale q k^T) v, without storing the scores in memory.

    Args:
        q: [batch, heads, seq_q, dim], fp16 or bf16, with a contiguous last dimension. dim is a
            multiple of 8 up to 256.
        k: [batch, kv_heads, seq_k, dim], of the dtype of q. heads is a multiple of kv_heads.
        v: [batch, kv_heads, seq_k, dim_v]. If dim_v differs from dim, gradients need a smaller
            dim_v: at most 128, with dim at most 192.
        causal: True (equal lengths), "bottom_right" (the last row attends to every column, as in
            FlashAttention) or "top_left" (row 0 attends only to column 0, as in torch).
        window: (left, right), the number of columns on each side of the diagonal that a row attends
            to; None is unbounded. The diagonal is that of `causal`, or else ends at the bottom
            right.
        softcap: Scores become softcap tanh(score / softcap).
        scale: The factor of q k^T, dim ** -0.5 by default.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: Variable-length sequences: q is
            [total_q, heads, dim], k and v [total_k, kv_heads, dim]. Sequence i has the rows
            cu_seqlens[i] to cu_seqlens[i + 1] (int32 [batch + 1] on the device of q), at most
            max_seqlen of them. Rows past the last sequence are not written.
        return_lse: Also return the log-sum-exp of each row's scores.
        out: The tensor that the result is written to; it cannot be combined with gradients.
        spec: The kernel to run, a KernelSpec or its name.
        deterministic: Whether gradients are bit-equal from run to run, which takes longer; None
            follows torch.are_deterministic_algorithms_enabled() at the time of the backward pass.
            Results are bit-equal in any case.
        backward_spec: The kernel that computes the gradients.
        sinks: [heads], fp32 or the dtype of q: one more term in the sum of each row, without a
            value.
        block_mask: The blocks of scores that are computed: the result of `warploom.block_mask`, or
            a BlockMask of torch's flex_attention. It excludes causal, window and variable lengths.
        alibi_slopes: fp32 [heads] or [batch, heads]: -slope |row + seq_k - seq_q - column| is added
            to scores, after a softcap.
        bias: fp16, bf16 or fp32 [batch, heads, seq_q, seq_k], or broadcastable to it (variable
            lengths: [sequences, heads, max_seqlen_q, max_seqlen_k]): is added to scores.
        mask: Booleans of the shapes of a bias: scores with False are masked.
        dropout_p: The probability that a weight of the softmax is dropped, rounded to a multiple of
            2^-16; the others are divided by the probability of keeping a weight.
        dropout_state: int64 [2] on the device of q, which determines the dropped weights, also in
            the gradients (see `warploom.dropout_mask`). None draws one from torch's generator, a
            new one in each replay of a CUDA graph.
        q_descale, k_descale, v_descale: For q and k in e4m3 or int8, and v in e4m3: the scales of
            the stored numbers, fp32 [batch, kv_heads] with any strides, not negative. q_descale may
            be [batch, heads, seq_q], and k_descale one for each 128 keys, [batch, kv_heads,
            blocks]. A v in bf16 or fp16 has none: the softmax's weights are then not rounded to
            e4m3.
        v_layout: "keys", as k, or "dim_major", as `attention_quantize` writes v in e4m3. The kernel
            reads the latter; the former is copied to it first.
        sums: How e4m3 weights times v are accumulated: "promoted" adds the partial sums of each KV
            tile in fp32, "fast" accumulates in the tensor core, which keeps about 14 bits. None is
            promoted up to dim 128 and fast above, where nothing else is supported.
        out_dtype: The dtype of the result of 8-bit operands: bf16, unless v is fp16.

    Returns:
        The result [batch, heads, seq_q, dim_v] (variable lengths: [total_q, heads, dim_v]), with
        the order of strides of q; with `return_lse` also the natural log-sum-exps, fp32 [batch,
        heads, seq_q] (variable lengths: [heads, total_q]). Both are differentiable, once, in q, k,
        v, sinks and bias. A fully masked row gives 0, and a log-sum-exp of -inf, or that of its
        head's sink.

    Raises:
        ProblemError: For arguments that are not supported, before anything is launched.

    Under autocast, q, k and v are converted as for torch's own attention. Runs on the current
    stream without waiting. On CPU tensors a reference computes the same.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 64).bfloat16() for _ in range(3))
        >>> warploom.attention(q, k, v, causal=True).shape
        torch.Size([1, 2, 16, 64])
    """
    if return_lse is not True and return_lse is not False:
        require_boolean("return_lse", return_lse)
    if q_descale is None and torch._C._is_any_autocast_enabled():
        q, k, v = lowered(q), lowered(k), lowered(v)
    values = (
        q,
        k,
        v,
        causal,
        window,
        softcap,
        scale,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        out,
        spec,
        deterministic,
        backward_spec,
        sinks,
        block_mask,
        alibi_slopes,
        bias,
        mask,
        dropout_p,
        dropout_state,
    )
    if (
        q_descale is not None
        or k_descale is not None
        or v_descale is not None
        or sums is not None
        or out_dtype is not None
        or v_layout != "keys"
    ):
        scales = (q_descale, k_descale, v_descale)
        computed = _eight_bits(*values, *scales, v_layout, sums, out_dtype)
        return computed if return_lse else computed[0]
    # A state that is drawn, lists of tiles and a kernel that is named are for the call to find.
    is_drawn = dropout_state is None and type(dropout_p) is float and dropout_p > 0
    repeats = block_mask is None and spec is None and not is_drawn
    if repeats and not torch.compiler.is_dynamo_compiling():
        result = _warm.again(values)
        if result is not None:
            return result if return_lse else result[0]
    call = AttentionCall(*values)
    if forward_ad._current_level >= 0:
        call.refuse_tangents()
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        result = operator_call.attention(call)
    else:
        try:
            plan = planned(call, AttentionPlan)
            result = plan.run_recorded(call)
        except WithoutMemoryError:
            result = operator_call.attention(call)
        except Exception as error:
            raise explained(error, call.require) from error.__cause__
        else:
            if repeats:
                plans.keep(_warm, values, call, plan, result)
    return result if return_lse else result[0]


def plan_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    **keywords: Unpack[Keywords],
) -> AttentionPlan:
    """Plan an attention: build and load its kernel now, and return what runs it.

    Args:
        q: [batch, heads, seq_q, dim], as for `warploom.attention`.
        k: [batch, kv_heads, seq_k, dim].
        v: [batch, kv_heads, seq_k, dim_v].
        keywords: The keywords of the calls, as for `warploom.attention`.

    Returns:
        The plan. `plan(q, k, v, ...)` runs tensors of the same shapes, strides, dtypes and
        alignment with the same keywords, and returns the result and the log-sum-exps.

    Raises:
        ProblemError: For arguments that are not supported, and for 8-bit operands.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 64).bfloat16() for _ in range(3))
        >>> out, lse = warploom.plan_attention(q, k, v, causal=True)(q, k, v, causal=True)
        >>> out.shape
        torch.Size([1, 2, 16, 64])
    """
    call = call_of(q, k, v, **keywords)
    if isinstance(call, EightBitCall):
        names = sorted(keywords.keys() & EightBitKeywords.__annotations__.keys())
        raise ProblemError(
            f"a plan with {', '.join(names)}",
            rule="must be of operands of 16 bits",
            fix="call warploom.attention itself",
        )
    call.require()
    return plans.plan(call)
