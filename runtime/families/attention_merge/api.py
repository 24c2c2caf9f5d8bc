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
    """Return attention over the keys of both a and b, from the results over each: out and lse.

    out_a and out_b are [.., dim], of fp16, bf16 or fp32 each, with at most three dimensions before
    the last; dim is a multiple of 8, at most 512. lse_a and lse_b are the natural log-sum-exps of
    their scores, fp32 [..]: of packed results [total, heads, dim], whose log-sum-exps are [heads,
    total], pass `lse.t()`. The keys of a and b are not the same ones, and b may be what was merged
    before: prefixes that several sequences share, blocks of a ring.

    lse = log(exp(lse_a) + exp(lse_b)), fp32; out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b,
    in the type of out_a, or `out_dtype`, rounded once. Where a log-sum-exp is -inf (or inf, as
    others tell of rows that attend to nothing), that side has no weight, whatever it holds; where
    both are, out is 0 and lse -inf.

    `out` and `lse` say where results go. They may be out_a and lse_a (or those of b) themselves: an
    fp32 out_a adds up in place. Else they share no memory with operands.
    Runs on the current stream without waiting. On CPU tensors the reference computes the same.
    Raises ProblemError before anything is launched; also for tensors that require grad.
    """
    return _merge(out_a, lse_a, out_b, lse_b, out, lse, out_dtype, spec)
