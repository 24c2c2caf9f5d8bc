"""What users call: `warploom.attention` and `warploom.plan_attention`."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import torch
from torch.autograd import forward_ad

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.problem import Alignment, Keywords, Window
from warploom.runtime.families.attention_forward import gradient, operator_call
from warploom.runtime.families.attention_forward import operators as _operators  # noqa: F401 (registers)
from warploom.runtime.families.attention_forward import plan as plans
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.families.attention_forward.eight_bit_call import (
    EightBitCall,
    EightBitKeywords,
    Sums,
    ValueLayout,
    call_of,
    of_8_bits,
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
    """Return softmax(scale q k^T) v, exactly, without the scores in memory.

    q is [batch, heads, seq_q, dim], k and v [batch, kv_heads, seq_k, dim], fp16 or bf16: any views
    with a contiguous last dimension. heads is a multiple of kv_heads, dim a multiple of 8 up to
    256. That of v may be another, which the result then has, too; for gradients it is the smaller
    one, and they are up to 192 and 128. The result has the shape of q and its order of strides.
    `scale` is dim ** -0.5 by default, of q and k.

    causal    True (equal lengths), "bottom_right" (the last row attends to every column, as in
              FlashAttention) or "top_left" (row 0 to column 0 only, as in torch)
    window    (left, right): a row attends to so many columns on each side of the diagonal, None
              being no bound. The diagonal is `causal`'s; without it, it ends at the bottom right.
              Together with causal, both apply
    softcap   scores become softcap tanh(score / softcap)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
              packed sequences: q [total_q, heads, dim], k and v [total_k, kv_heads, dim]; sequence
              i has the rows cu_seqlens[i] to cu_seqlens[i + 1] (int32 [batch + 1] on the device of
              q), at most max_seqlen of them. Rows past the last sequence are not written
    return_lse  also return the log-sum-exp of each row's scores: natural, fp32
              [batch, heads, seq_q], packed [heads, total_q]
    out, spec   where the result goes, and the kernel to run
    deterministic  whether gradients are bit-equal from run to run, which takes longer; None
              follows torch.are_deterministic_algorithms_enabled() as it is in the backward pass.
              Results are bit-equal in any case
    backward_spec  the kernel that computes the gradients
    sinks     [heads], fp32 or of the type of q: a score more in the sum of each row, of no value
    block_mask  which blocks of scores count, and which scores of some: what `warploom.block_mask`
              returns, or a BlockMask of torch's flex_attention. Blocks that do not count cost
              nothing. It goes with neither causal, window nor packed sequences
    alibi_slopes  fp32 [heads] or [batch, heads]: -slope |row + seq_k - seq_q - column| is added to
              scores, after a softcap
    bias      fp16, bf16 or fp32, [batch, heads, seq_q, seq_k] (packed: [sequences, heads,
              max_seqlen_q, max_seqlen_k]) or what broadcasts to it: is added to scores, likewise
    mask      truth values of the shapes of a bias: scores of False do not count
    dropout_p   the probability with which a weight of the softmax is dropped, to the nearest
              multiple of 2^-16; the others are divided by the probability with which they are kept
    dropout_state  int64 [2] on the device of q: which weights are dropped follows from it and from
              their places (see `warploom.dropout_mask`), in the gradients too. None: one is drawn
              from torch's generator, a new one in each replay of a CUDA graph
    q_descale, k_descale, v_descale
              with q and k of e4m3 or int8, and v of e4m3: what they are multiplied by, fp32
              [batch, kv_heads] of any strides, greater than 0 (or 0). q_descale may be of each row,
              [batch, heads, seq_q], and k_descale of each 128 keys, [batch, kv_heads, blocks].
              v may be of bf16 or fp16, without v_descale: weights are then not rounded to e4m3
    v_layout  "keys", as k lies, or "dim_major", as `attention_quantize` writes v of e4m3: the
              kernel reads this, to which the other is copied first
    sums      of e4m3 weights and v: "promoted" adds those of each kv tile up in fp32, "fast" leaves
              all to the tensor core, whose sums of 8-bit products have 13 bits and lose digits of a
              v that has a mean. None is promoted up to dim 128, and fast beyond, where that is all
    out_dtype  of the output of 8-bit operands: bf16, unless v is fp16

    A row that attends to nothing gives 0, and -inf as its log-sum-exp, or its head's sink. Both
    results are differentiable, once, in q, k, v, sinks and bias; these, the result and its
    log-sum-exp are kept for that.
    `out` takes no part in gradients. Under autocast, q, k and v are converted as torch converts
    those of its own attention. Runs on the current stream without waiting. On CPU tensors the
    reference computes the same. Raises ProblemError before anything is launched.
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
    if of_8_bits(q_descale, k_descale, v_descale, v_layout, sums, out_dtype):
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
            result = gradient.run(plan, call)
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

    Arguments are those of `attention`. `plan(q, k, v, ...)` then runs tensors of the same shapes,
    strides, types and alignment with the same keywords, and returns out and lse.

    Raises ProblemError for operands of 8 bits, too, which have no plan.
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
