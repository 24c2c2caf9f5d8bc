"""What users call: `warploom.gemm` and `warploom.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch.autograd import forward_ad

from warploom.generator.epilogue import GateLayout
from warploom.generator.families.gemm import Accumulation
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import named
from warploom.runtime.families._product.epilogue import Item, Keywords
from warploom.runtime.families._product.epilogue import items as epilogue_items
from warploom.runtime.families.gemm import operators
from warploom.runtime.families.gemm import plan as plans
from warploom.runtime.families.gemm.call import GemmCall, check_gradient_options
from warploom.runtime.families.gemm.gradient_rule import Preactivation
from warploom.runtime.families.gemm.plan import GemmPlan
from warploom.runtime.plan import make
from warploom.runtime.rounding import drawn
from warploom.runtime.tensors import WithoutMemoryError, explained, inside_vmap, lowered


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str | None = None,
    gate: str | None = None,
    gate_layout: GateLayout = "halves",
    scale_a: float | torch.Tensor | None = None,
    scale_b: float | torch.Tensor | None = None,
    scale_d: float | torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: Accumulation = "fast",
    epilogue: Sequence[Item] | None = None,
    rounding: str = "nearest",
    rounding_state: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
    preactivation: Preactivation = "save",
    accumulate_into: torch.Tensor | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return scale_d (activation(scale_a scale_b (a b) + bias) + beta residual).

    a is [.., M, K] and b [.., K, N] (a torch weight [N, K] is b after .t()), of one type: fp16,
    bf16, e4m3, e5m2 or int8; e4m3 and e5m2 also mix. Batches broadcast. Products accumulate in
    fp32, for int8 in int32; sums of fp8 keep about 14 bits, with `accumulation="promoted"` only
    those over 128 of k, at the cost of some speed. The result [.., M, N] has `out_dtype`: by
    default that of 16-bit operands, int32 for int8 without epilogue, else bf16. 8-bit results
    saturate, round to nearest even and keep NaN (int8: 0).

    scale_a is a number, a one-element tensor, [M] or [M, 1]; scale_b likewise, [N] or [1, N];
    tensors are fp32. bias is [N], residual [M, N]; both fp16, bf16 or fp32. beta = 0 does not read
    the residual. All of these may have the batches of the result before the dimensions given here.
    activation is relu, gelu, gelu_tanh or silu. gate, in its place, halves the columns of what it
    is given, and of the result: a function, one of these or swiglu_oai, of the gate's half times
    up's. gate_layout says which these are: "halves", all columns of the gate before all of up, as
    weights [gate; up] have them, or "interleaved", in turn. Each has a multiple of 8 columns. amax,
    an fp32 tensor of one element, is raised to the largest magnitude before scale_d, a number or a
    one-element fp32 tensor. `epilogue` gives any other order, as a list of items (see
    `runtime/families/_product/steps`). `out` may be exactly the residual. `spec` names the kernel.
    rounding of the result, in 16 or 8 bits, is "nearest" or "stochastic": one of the two
    neighbours, at random, with the value as its mean. rounding_state, int64 [2] on the device of a,
    is what the random numbers are a function of, with the place in the result; None: drawn from
    torch's generator. Gradients pass straight through it.

    The result is differentiable, once, in a, b, bias, residual and tensors of scales, but not with
    `out`. preactivation says where the backward pass has from what the activation is given: kept by
    the forward pass ("save"), or computed again ("recompute"). accumulate_into, fp32 of b's shape,
    has the gradient of b added to it in place, and b.grad is left alone. gradient_dtype is what
    gradients are multiplied with fp8 operands in: bf16, or float8_e5m2, scaled to its range.

    Under autocast, a and b of 16 or 32 bits are converted as torch converts those of torch.mm.
    Runs on the current stream without waiting. On CPU tensors the reference computes the same.
    Raises ProblemError before anything is launched.
    """
    listed: Sequence[Item] = ()
    if rounding == "stochastic" and rounding_state is None and isinstance(a, torch.Tensor):
        rounding_state = drawn(a.device)
    if (
        scale_a is not None
        or scale_b is not None
        or bias is not None
        or activation is not None
        or gate is not None
        or residual is not None
        or amax is not None
        or scale_d is not None
        or epilogue is not None
        or rounding != "nearest"
        or rounding_state is not None
        or type(beta) is not float  # a tensor would be waited for
        or beta != 1
        or gate_layout != "halves"
    ):
        listed = epilogue_items(
            scale_a=scale_a,
            scale_b=scale_b,
            bias=bias,
            activation=activation,
            gate=gate,
            gate_layout=gate_layout,
            residual=residual,
            beta=beta,
            amax=amax,
            scale_d=scale_d,
            epilogue=epilogue,
            rounding=rounding,
            rounding_state=rounding_state,
        )
    if torch._C._is_any_autocast_enabled():
        a, b = lowered(a), lowered(b)
    if forward_ad._current_level >= 0:
        GemmCall(a, b, listed, out).refuse_tangents()
    if accumulate_into is not None or gradient_dtype is not None or preactivation != "save":
        check_gradient_options(b, preactivation, accumulate_into, gradient_dtype)
    gradients = preactivation, accumulate_into, gradient_dtype
    # Compilers, and modes that decide by operator (selective checkpoints, fake tensors), see these.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return operators.call(a, b, listed, out, out_dtype, accumulation, spec, *gradients)
    found = None if spec is None else named(spec)
    call = GemmCall(a, b, listed, out, out_dtype, accumulation, found, *gradients)
    try:
        return plans.gemm(call)
    except WithoutMemoryError:  # torch knows which code is to see these tensors
        return operators.call(a, b, listed, out, out_dtype, accumulation, found, *gradients)
    except Exception as error:
        if inside_vmap():  # whose tensors have no memory, and which the operators fold
            return operators.call(a, b, listed, out, out_dtype, accumulation, found, *gradients)
        raise explained(error, call.require) from error.__cause__


def plan(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: Accumulation = "fast",
    spec: KernelSpec | str | None = None,
    **keywords: Unpack[Keywords],
) -> GemmPlan:
    """Plan a call: build and load its kernel now, and return what runs it with least overhead.

    Arguments are those of `gemm`. `plan(a, b, out, ...)` then runs tensors of the same shapes,
    strides, types and alignment, with the same keywords; pass `out` here if it is passed there.
    """
    call = asked(
        a, b, out=out, out_dtype=out_dtype, accumulation=accumulation, spec=spec, **keywords
    )
    call.require()
    return make(call, GemmPlan)


def asked(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: Accumulation = "fast",
    spec: KernelSpec | str | None = None,
    **keywords: Unpack[Keywords],
) -> GemmCall:
    """The call that the arguments of `plan` ask for."""
    listed = epilogue_items(**keywords)
    return GemmCall(a, b, listed, out, out_dtype, accumulation, named(spec))
