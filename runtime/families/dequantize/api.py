"""Dense weights of quantized ones: the function that users call."""

from __future__ import annotations

import torch

from warploom.arguments import shown
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedExperts, PackedWeight
from warploom.runtime.families.dequantize.call import DequantizeCall, DequantizeRowsCall, packing
from warploom.runtime.function import Function

_dequantize = Function("dequantize", DequantizeCall, into=True)
_dequantize_rows = Function("dequantize_rows", DequantizeRowsCall, into=True)


def dequantize(
    weight: PackedWeight | PackedExperts | torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    scale: torch.Tensor | None = None,
    first: int = 0,
    end: int | None = None,
    out: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Compute the dense weight that a quantized one stands for, in one kernel.

    Each element is scale * (code - zero point), rounded to fp32 (nvfp4: times the second-level
    scale of its row, rounded again), and then to `dtype`: the bits of `weight.dequantize(dtype)`.

    Args:
        weight: A PackedWeight [N, K], or PackedExperts [E, N, K]; of any format, quantized for any
            activations. Or float8_e4m3fn [N, K] or [E, N, K] with `scale`, which is copied unless
            it is contiguous along K.
        dtype: torch.bfloat16 or torch.float16.
        scale: Of an e4m3 weight, fp32 or float8_e8m0fnu [.., N / 128, K / 128], rounded up: one for
            each 128x128.
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
    parts: tuple[torch.Tensor | None, ...]
    if isinstance(weight, PackedWeight | PackedExperts):
        parts = weight.slabs, weight.channel_scales, weight.channel_zeros
        experts = len(weight) if isinstance(weight, PackedExperts) else 0
    elif isinstance(weight, torch.Tensor):
        parts, experts = (weight, scale), weight.shape[0] if weight.dim() == 3 else 0
    else:
        raise _no_weight(f"weight {shown(weight)} of type {type(weight).__name__}")
    if (scale is None) == isinstance(weight, torch.Tensor):
        raise _no_weight(f"weight of type {type(weight).__name__} with scale {shown(scale)}")
    if first != 0 or end is not None:
        last = experts if end is None else end
        if type(first) is not int or type(last) is not int or not 0 <= first <= last <= experts:
            raise ProblemError(
                f"experts {shown(first)} to {shown(end)} of {experts}",
                rule="must be a range of the weight's experts, whose bounds are integers",
                fix="leave first and end out for all of a weight",
            )
        if not isinstance(weight, torch.Tensor) or _of_as_many(scale, experts):
            parts = tuple(None if one is None else one[first:last] for one in parts)
    if isinstance(weight, torch.Tensor):
        return _dequantize_rows(*parts, dtype, spec, out)[0]
    data, scales, zeros = parts
    return _dequantize(data, packing(weight.metadata), scales, zeros, dtype, spec, out)[0]


def _of_as_many(scale: object, experts: int) -> bool:
    """Whether scales are those of so many experts. Others stay whole, and the call refuses them."""
    return isinstance(scale, torch.Tensor) and scale.dim() > 0 and scale.shape[0] == experts


def _no_weight(value: str) -> ProblemError:
    return ProblemError(
        value,
        rule="must be a PackedWeight or PackedExperts, or a tensor of e4m3 with scale",
        fix="make one with warploom.quantize or warploom.PackedExperts.quantize",
    )
