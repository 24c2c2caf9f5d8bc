"""What users call: `warploom.mixed_gemm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedWeight
from warploom.runtime.dispatch import named
from warploom.runtime.families._product.call import Checked, WarmProducts
from warploom.runtime.families._product.epilogue import Item, defaults
from warploom.runtime.families._product.epilogue import items as epilogue_items
from warploom.runtime.families.mixed_gemm import gradient, operators
from warploom.runtime.families.mixed_gemm.call import MixedGemmCall
from warploom.runtime.philox import drawn
from warploom.runtime.plan import Plan, planned
from warploom.runtime.tensors import WithoutMemoryError, explained, inside_vmap, lowered


def mixed_gemm(
    a: torch.Tensor,
    weight: PackedWeight,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str | None = None,
    scale_a: float | torch.Tensor | None = None,
    scale_d: float | torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    epilogue: Sequence[Item] | None = None,
    rounding: str = "nearest",
    rounding_state: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Multiply activations by a quantized weight of 2, 4 or 8 bits, with the epilogue of `gemm`.

    The result is scale_d * (activation(scale_a * (a @ W.T) + bias) + beta * residual), where W is
    scale * (code - zero point).

    Args:
        a: [.., M, K], fp16, bf16, float8_e4m3fn or int8. Batches are rows of one GEMM.
        weight: W [N, K], quantized for such activations (`activations=` of `warploom.quantize`).
            16-bit a takes every format; e4m3 takes int4, uint4, e4m3, mxfp4 and mxfp8; int8 takes
            int4, uint4, int8, int2 and ternary.
        out: The tensor that the result is written to; it may be exactly the residual. It cannot be
            combined with gradients.
        bias: [N], fp16, bf16 or fp32.
        residual: [.., M, N], fp16, bf16 or fp32, with one row stride for all rows.
        beta: The factor of the residual; 0 does not read it.
        activation: "relu", "gelu", "gelu_tanh" or "silu".
        scale_a: A number, or an fp32 tensor of one element, [M] or [M, 1].
        scale_d: A number, or an fp32 tensor of one element.
        amax: An fp32 tensor of one element, which is raised to the largest magnitude of the result
            before `scale_d`.
        out_dtype: The dtype of the result, by default that of 16-bit activations, else bf16.
        epilogue: A list of steps in any other order, instead of the keywords, as for `gemm`. With
            ("gate_interleaved", "silu") the result is [.., M, N / 2]: rows of gate and up must take
            turns in the weight.
        rounding: "nearest" or "stochastic", as for `gemm`.
        rounding_state: int64 [2], the state of stochastic rounding, as for `gemm`.
        spec: The kernel to run, a KernelSpec or its name.

    Returns:
        The result, [.., M, N]. It is differentiable, once, in a, bias, residual and tensors of
        scales, but not in the weight.

    Raises:
        ProblemError: For arguments that are not supported, before anything is launched.

    Accumulators are fp32. Kernels for many rows of 16-bit activations may round weights, and scales
    of another dtype, to the dtype of a. Under autocast, a of 16 or 32 bits is converted as for
    torch.mm. Runs on the current stream without waiting. On CPU tensors a reference computes the
    same in float64.

    Example:
        >>> weight = warploom.quantize(torch.randn(32, 128), "int4", group=128)
        >>> warploom.mixed_gemm(torch.randn(4, 128).bfloat16(), weight).shape
        torch.Size([4, 32])
    """
    if torch._C._is_any_autocast_enabled():
        a = lowered(a)
    if rounding == "stochastic" and rounding_state is None and isinstance(a, torch.Tensor):
        rounding_state = drawn(a.device)
    warm = None
    values: tuple[Any, ...] = ()
    known = spec is None and isinstance(weight, PackedWeight)
    if known and not torch.compiler.is_dynamo_compiling():
        warm, values = (
            _warm.keywords,
            (
                a,
                weight.slabs,
                weight.channel_scales,
                weight.channel_zeros,
                weight.metadata,
                out,
                bias,
                residual,
                beta,
                activation,
                scale_a,
                scale_d,
                amax,
                rounding,
                rounding_state,
                out_dtype,
            ),
        )
        if epilogue is not None:
            warm, values = _warm.of_list(values, epilogue)
        d = None if warm is None else warm.again(values)
        if d is not None:
            return d
    listed: Sequence[Item] = ()
    if (
        scale_a is not None
        or bias is not None
        or activation is not None
        or residual is not None
        or amax is not None
        or scale_d is not None
        or epilogue is not None
        or rounding != "nearest"
        or rounding_state is not None
        or type(beta) is not float  # a tensor would be waited for
        or beta != 1
    ):
        listed = epilogue_items(
            scale_a=scale_a,
            bias=bias,
            activation=activation,
            residual=residual,
            beta=beta,
            amax=amax,
            scale_d=scale_d,
            epilogue=epilogue,
            rounding=rounding,
            rounding_state=rounding_state,
        )
    if forward_ad._current_level >= 0:
        MixedGemmCall(a, weight, listed, out).refuse_tangents()
    call = MixedGemmCall(a, weight, listed, out, out_dtype, spec)  # type: ignore[arg-type]
    # Compilers, and modes that decide by operator, see these.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return operators.call(call)
    if spec is not None:
        call.spec = named(spec)
    try:
        plan: Plan[Checked, torch.Tensor] = planned(call, Plan)
        if torch.is_grad_enabled() and call.requires_grad:
            d = gradient.run(plan, call)
            if warm is not None:
                gradient.keep_warm(warm, values, call, plan, d)
            return d
        d = plan.run(call)
        if warm is not None:
            warm.keep(values, call, plan, d)
        return d
    except WithoutMemoryError:  # torch knows which code is to see these tensors
        return operators.call(call)
    except Exception as error:
        if inside_vmap():  # whose tensors have no memory, and which the operators fold
            return operators.call(call)
        raise explained(error, call.require) from error.__cause__


_WEIGHT = ("weight.data", "weight.channel_scales", "weight.channel_zeros", "metadata")
_warm = WarmProducts(
    MixedGemmCall,
    ("a", *_WEIGHT),
    defaults(mixed_gemm),
    ("out_dtype",),
    lambda a, data, scales, zeros, metadata: (a, PackedWeight(data, metadata, scales, zeros)),
)
