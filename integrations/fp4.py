"""Linear layers in fp4, emulated: e2m1 values in e4m3 GEMMs, for training that is aware of them.

The numerics are those of arXiv 2501.17116, "Optimizing Large Language Model Training Using FP4
Quantization", and of its authors' code (MS-AMP):

weight       one scale for each output feature, the largest magnitude being 6; to the nearest, ties
             to even
input        clamped to the quantiles 1 - QUANTILE and QUANTILE of its row, then quantised likewise;
             what the clamp takes away is multiplied in 16 bits and added (outlier compensation)
gradients    in 16 bits, by the quantised weight and the quantised input with its outliers. That of
             the weight is multiplied with the derivative of a soft quantiser (DGE), which is steep
             half way between two values and flat at them; that of the input has slope 1

Hopper multiplies no fp4: this shows what a model loses by it, and is slower than bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from warploom.integrations.float8 import Options, Quantised, WithTranspose, multiply
from warploom.integrations.recipes import E4M3
from warploom.integrations.scaling import ParameterCache
from warploom.runtime.families._product.epilogue import Item
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.tensors import refuse_transforms

LARGEST = 6.0  # of e2m1
QUANTILE = 0.99  # of a row of the input, where it is clamped
SHARPNESS = 5.0  # k of the soft quantiser
STEEPEST = 3.0  # what its derivative is capped at


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest values of e2m1, ties to even, of fp32 values up to 6 in magnitude."""
    step = _step(x.abs())
    return torch.round(x / step) * step


def slope(x: torch.Tensor) -> torch.Tensor:
    """The derivative of the soft quantiser at fp32 values up to 6 in magnitude.

    Between two values of e2m1 that are d apart, t being how far x is from the lower one:
    |2 t / d - 1| ** (1 / SHARPNESS - 1) / SHARPNESS, at most STEEPEST.
    """
    size = x.abs()
    step = _step(size)
    distance = (2 * torch.remainder(size, step) / step - 1).abs()
    return (distance ** (1 / SHARPNESS - 1) / SHARPNESS).clamp(max=STEEPEST)


def quantised(x: torch.Tensor) -> Quantised:
    """Quantise x [m, k] to e2m1, as e4m3 has its values, with a scale for each row."""
    peak = x.abs().amax(-1).float()
    scale = torch.where(peak == 0, 1.0, peak / LARGEST)
    return Quantised(rounded(_scaled(x, scale)).to(E4M3), scale)


def clamped(x: torch.Tensor) -> torch.Tensor:
    """Clamp each row of x [m, k] to its quantiles 1 - QUANTILE and QUANTILE."""
    columns = x.shape[1]
    place = QUANTILE * (columns - 1)
    beyond = columns - int(place)  # values that are needed of either end
    bounds = []
    for largest in (False, True):
        ends = x.detach().topk(beyond, dim=-1, largest=largest).values.float()
        inner, outer = ends[:, -1:], ends[:, max(beyond - 2, 0)].unsqueeze(1)
        bounds.append(inner + (outer - inner) * (place - int(place)))
    return x.float().clamp(*bounds)


def wide(x: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """What quantised values stand for, rounded to a type of 16 bits."""
    return (x.values.float() * x.scale.unsqueeze(-1)).to(dtype)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    cache: ParameterCache[WithTranspose],
) -> torch.Tensor:
    """Return activation(x [m, k] times weight [n, k] transposed + bias); differentiable.

    `cache` has the weight as it was quantised before.
    """
    refuse_transforms("a layer that trains in fp4")
    result: torch.Tensor = _Product.apply(x, weight, bias, options, cache)  # type: ignore[no-untyped-call]
    return result


def operands(x: torch.Tensor, weight: torch.Tensor) -> tuple[Quantised, Quantised]:
    """x [m, k] without its outliers and weight [n, k], as the e4m3 GEMM multiplies them."""
    return quantised(clamped(x)), quantised(weight)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: Options,
        cache: ParameterCache[WithTranspose],
    ) -> torch.Tensor:
        of_weight, _ = cache.get(weight, lambda: (quantised(weight), None), options.recipe)
        assert of_weight is not None  # noqa: S101 (for type checkers)
        kind = torch.float16 if x.dtype == torch.float16 else torch.bfloat16
        inner = clamped(x)
        outliers = x.float() - inner
        of_x = quantised(inner)
        of_outliers = gemm(outliers.to(kind), wide(of_weight, kind).t(), out_dtype=torch.float32)
        items: list[Item] = [("residual", of_outliers, 1.0)]
        if bias is not None:
            items.append(("bias", bias))
        z = None
        if options.activation is not None:
            z = x.new_empty((x.shape[0], weight.shape[0]), dtype=options.out_dtype)
            items += [("preactivation", z), ("activation", options.activation)]
        whole = None
        if ctx.needs_input_grad[1]:
            whole = (of_x.values.float() * of_x.scale.unsqueeze(-1) + outliers).to(kind)
        ctx.save_for_backward(*of_weight, weight, whole, z)
        ctx.options, ctx.kind = options, kind
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return multiply(of_x, of_weight, items=items, out_dtype=options.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, weight and bias that are wanted."""
        values, scale, weight, whole, z = ctx.saved_tensors
        types, options, dx, dw, db = ctx.types, ctx.options, None, None, None
        wants_x, _, wants_sums, *_ = ctx.needs_input_grad
        dz, sums = dy, None
        if z is not None or wants_sums:
            before, sums = activation_backward(dy, z, options.activation, sums=wants_sums)
            dz = dy if before is None else before
        with torch.autocast(dy.device.type, enabled=False):
            gradient = dz.to(ctx.kind)
            if wants_x:
                of_weight = wide(Quantised(values, scale), ctx.kind)
                dx = gemm(gradient, of_weight, out_dtype=types[0])
            if whole is not None:
                dw = gemm(gradient.t(), whole, out_dtype=torch.float32)
                dw = dw * slope(_scaled(weight, scale))
                if options.main_grad is None:
                    dw = dw.to(types[1])
                else:
                    options.main_grad.add_(dw)
                    dw = None
            if sums is not None:
                db = sums.to(types[2])
        return dx, dw, db, None, None


def _scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [m, k] divided by the scale of each row: at most 6, which a rounded scale may miss."""
    return (x.float() / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST)


def _step(size: torch.Tensor) -> torch.Tensor:
    """How far the values of e2m1 around a magnitude are apart: 0 0.5 1 1.5 2 3 4 6."""
    return torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
