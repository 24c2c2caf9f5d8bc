"""Dense weights of quantized ones: the function that users call."""

from __future__ import annotations

import torch

from warploom.arguments import shown
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedExperts, PackedWeight
from warploom.runtime.families.dequantize.call import DequantizeCall, packing
from warploom.runtime.function import Function

_dequantize = Function("dequantize", DequantizeCall, into=True)


def dequantize(
    weight: PackedWeight | PackedExperts,
    dtype: torch.dtype = torch.bfloat16,
    *,
    first: int = 0,
    end: int | None = None,
    out: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Compute the dense weight that a quantized one stands for, in one kernel.

    Each element is scale * (code - zero point), rounded to fp32 (nvfp4: times the second-level
    scale of its row, rounded again), and then to `dtype`: the bits of `weight.dequantize(dtype)`.

    Args:
        weight: A PackedWeight [N, K], or PackedExperts [E, N, K]; of any format, packed for any
            activations.
        dtype: torch.bfloat16 or torch.float16.
        first: Of experts, the first that is dequantized.
        end: Of experts, the one past the last; None: all from `first` on.
        out: The tensor that the result is written to: contiguous along K, with rows and experts
            any number of elements apart.
        spec: The kernel to run, a KernelSpec or its name.

    Returns:
        [N, K], or [end - first, N, K] of experts.

    Raises:
        ProblemError: For arguments that are not supported, before anything is launched.

    Runs on the current stream without waiting. On CPU tensors plain torch operations compute it.

    Example:
        >>> weight = warploom.quantize(torch.randn(64, 128), "int4", group=128)
        >>> w = warploom.dequantize(weight)
        >>> w.shape, torch.equal(w, weight.dequantize())
        (torch.Size([64, 128]), True)
    """
    if not isinstance(weight, PackedWeight | PackedExperts):
        raise ProblemError(
            f"weight {shown(weight)} of type {type(weight).__name__}",
            rule="must be a PackedWeight or PackedExperts",
            fix="make one with warploom.quantize or warploom.PackedExperts.quantize",
        )
    data, scales, zeros = weight.slabs, weight.channel_scales, weight.channel_zeros
    if first != 0 or end is not None:
        count = len(weight) if isinstance(weight, PackedExperts) else 0
        last = count if end is None else end
        if type(first) is not int or type(last) is not int or not 0 <= first <= last <= count:
            raise ProblemError(
                f"experts {shown(first)} to {shown(end)} of {count}",
                rule="must be a range of the experts of a PackedExperts",
                fix="leave first and end out for all of a weight",
            )
        data = data[first:last]
        scales = None if scales is None else scales[first:last]
        zeros = None if zeros is None else zeros[first:last]
    values = data, packing(weight.metadata), scales, zeros, dtype, spec, out
    return _dequantize(*values)[0]
