"""Partial results of attention as one: the function that users call."""

from __future__ import annotations

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.function import Function

_merge = Function("attention_merge", AttentionMergeCall)


def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    spec: KernelSpec | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two sets of keys into attention over both: return out and lse.

    lse = log(exp(lse_a) + exp(lse_b)) and out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
    Use it for prefixes that several sequences share, and for the blocks of ring attention.

    Args:
        out_a, out_b: [.., dim], each fp16, bf16 or fp32, with at most three dimensions before the
            last; dim is a multiple of 8 up to 512.
        lse_a, lse_b: Their natural log-sum-exps, fp32 [..]. For varlen results [total, heads, dim],
            whose log-sum-exps are [heads, total], pass `lse.t()`. An operand whose log-sum-exp is
            -inf (or inf, which some libraries report for fully masked rows) has weight 0, even if
            it contains NaN.
        out: The tensor that the result is written to. It may be out_a or out_b itself, so that an
            fp32 result accumulates in place; otherwise it must not overlap operands.
        lse: The tensor that the log-sum-exp is written to, likewise.
        out_dtype: The dtype of the result, that of out_a by default.
        spec: The kernel to run, a KernelSpec or its name.

    Returns:
        out, rounded once, and lse in fp32. If both operands are fully masked, 0 and -inf.

    Raises:
        ProblemError: For arguments that are not supported and tensors that require a gradient,
            before anything is launched.

    Runs on the current stream without waiting. On CPU tensors a reference computes the same.

    Example:
        >>> out_a, out_b = torch.randn(2, 4, 8, 16, 64).bfloat16()
        >>> lse_a, lse_b = torch.randn(2, 4, 8, 16)
        >>> out, lse = warploom.merge_state(out_a, lse_a, out_b, lse_b)
        >>> out.shape, lse.shape
        (torch.Size([4, 8, 16, 64]), torch.Size([4, 8, 16]))
    """
    return _merge(out_a, lse_a, out_b, lse_b, out, lse, out_dtype, spec)
