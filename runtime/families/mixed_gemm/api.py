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
from warploom.runtime.plan import Plan, planned
from warploom.runtime.rounding import drawn
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
    """Return scale_d (activation(scale_a (a W') + bias) + beta residual), W of 2, 4 or 8 bits.

    a is [.., M, K] of fp16, bf16, e4m3 or int8; W is a PackedWeight [N, K] that is packed for
    such `activations`. 16 bits multiply all formats, e4m3 int4, uint4, e4m3 and mxfp4, and int8
    int4, uint4, int8, int2 and ternary. The result [.., M, N] has `out_dtype`: by default that of
    16-bit activations, else bf16.

    W is scale * (code - zero) exactly, and sums are fp32; but kernels for many rows of 16 bits may
    round weights, and scales of another type before, to the type of a.

    scale_a is a number, a one-element tensor, [M] or [M, 1]; bias is [N], residual [.., M, N],
    scale_d a number or a one-element tensor, amax a tensor of one element. These, `epilogue`,
    `rounding` and `out` are those of `warploom.gemm`; but batches are rows of one product, and what
    the epilogue reads must lie so too.

    The result is differentiable, once, in a, bias, residual and tensors of scales, but not with
    `out`, and not in the weight: a gradient of a is a product with the weight in 16 bits.

    Under autocast, a of 16 or 32 bits is converted as torch converts those of torch.mm. Runs on the
    current stream without waiting. On CPU tensors the reference computes the same, in float64.
    Raises ProblemError before anything is launched.
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
        d = gradient.run(plan, call)
        if warm is not None:
            gradient.keep_warm(warm, values, call, plan, d)
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
