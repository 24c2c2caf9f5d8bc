"""Grouped GEMM with quantized weights, as experts have them: the function that users call."""

from __future__ import annotations

import torch

from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.quantization.packed_experts import PackedExperts
from warploom.runtime.families._product.steps.gate import ALPHA, LIMIT
from warploom.runtime.families.mixed_gemm.grouped_call import GroupedMixedCall
from warploom.runtime.function import Function
from warploom.runtime.tensors import lowered, shown

_grouped = Function("grouped_mixed_gemm", GroupedMixedCall, into=True)


def grouped_mixed_gemm(
    a: torch.Tensor,
    weight: PackedExperts,
    *,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    activation: str | None = None,
    gate: str | None = None,
    gate_alpha: float = ALPHA,
    gate_limit: float = LIMIT,
    row_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Multiply groups of rows by a quantized weight each, as a mixture of experts does.

    Args:
        a: [S, K], the rows of all groups: fp16, bf16, e4m3 or int8, as for `warploom.mixed_gemm`.
        weight: [G, N, K], a quantized weight for each group, at most 1,024.
        offs: int32 [G], on the device of a: where each group ends, in order; the first begins at 0.
            The host does not read it: one CUDA graph serves all routings. An offset below the one
            before it counts as that, and one past S as S.
        bias: [G, N] or [N], fp16, bf16 or fp32: added to the rows of its group.
        scale_a: fp32 [S], a scale of each row of a, or of one element.
        activation: relu, gelu, gelu_tanh or silu, applied behind the bias.
        gate: silu, gelu, gelu_tanh, relu or swiglu_oai: rows of gate and up take turns in each
            weight, and the result [S, N / 2] is gate(even columns) * odd columns.
        gate_alpha: Of swiglu_oai, whose gate is g sigmoid(alpha g).
        gate_limit: Of swiglu_oai: gate is at most this, and up between minus this and this.
        row_scale: fp32 [S]: multiplies each row of the result last, as a routing weight does.
        out: Where the result is written; None: it is made.
        out_dtype: Of the result; by default that of 16-bit activations, else bf16.
        spec: The kernel to run, or its name.

    Returns:
        [S, N], or [S, N / 2] with a gate. Rows past the last offset belong to no group: they are
        not written. It has no gradient.

    Runs on the current stream without waiting, as one launch. On CPU tensors the reference
    computes the same, in float64.

    Raises:
        ProblemError: Before anything is launched, naming the value and the fix; for offsets that
            are not in order where they are on the CPU.

    Example:
        >>> tokens = torch.randn(6, 64).bfloat16()
        >>> experts = torch.randn(3, 128, 64).bfloat16()  # [G, N, K]
        >>> packed = warploom.PackedExperts.quantize(experts, "mxfp4")
        >>> ends = torch.tensor([2, 2, 6], dtype=torch.int32)  # the second has no token
        >>> warploom.grouped_mixed_gemm(tokens, packed, offs=ends).shape
        torch.Size([6, 128])
    """
    if not isinstance(weight, PackedExperts):
        raise ProblemError(
            f"weight {shown(weight)} of type {type(weight).__name__}",
            rule="must be PackedExperts",
            fix="make them with warploom.PackedExperts.quantize; warploom.grouped_gemm takes "
            "tensors",
        )
    if torch._C._is_any_autocast_enabled():
        a = lowered(a)
    return _grouped(
        *(a, weight.slabs, offs, weight.metadata, weight.channel_scales, weight.channel_zeros),
        *(bias, scale_a, row_scale, activation, gate, out, out_dtype, spec, gate_alpha, gate_limit),
    )[0]
