"""Linear layers in fp8: operands are quantised in each call, and gradients pass straight through.

A recipe has the name that torchao gives to its like:

tensorwise           one scale for x, one for the weight
rowwise              a scale for each row of x and of the weight, all powers of two
rowwise_with_gw_hp   the same, but the weight's gradient is of x as it was

Scales come from the largest magnitude there is now; nothing waits for the GPU. Forward operands are
e4m3. The gradient is multiplied in bf16, or quantised to e5m2, with the quantised operands: what is
differentiated is the product that was computed, as if quantisation had slope 1.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.autograd.function import once_differentiable

from warploom.runtime.families._product.epilogue import Item
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.gemm.api import gemm

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
RECIPES: tuple[str, ...] = get_args(Recipe)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT_TYPES = (torch.bfloat16, E5M2)
_SMALLEST = 2.0**-100  # of scales: zeros have one too, and its inverse is finite
_FRACTION = 0x7FFFFF  # the bits of an fp32 below its exponent


class Quantised(NamedTuple):
    """A matrix [m, k]: `values` times `scale`, fp32, of one element or of one for each row."""

    values: torch.Tensor
    scale: torch.Tensor

    def wide(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """It in bf16, and what is left to multiply with; powers of two are in the values."""
        values = self.values.to(torch.bfloat16)
        if self.scale.numel() == 1:
            return values, self.scale
        return values * self.scale.to(torch.bfloat16).unsqueeze(-1), None


class Options(NamedTuple):
    """What a layer asks of its products.

    activation  a function of the product and its bias, by its name
    main_grad   has the weight's gradient added to it, fp32, in its place; None: autograd has it
    """

    recipe: Recipe
    gradient_dtype: torch.dtype
    out_dtype: torch.dtype
    activation: str | None = None
    main_grad: torch.Tensor | None = None


def quantised(x: torch.Tensor, dtype: torch.dtype, *, rowwise: bool) -> Quantised:
    """Quantise x [m, k] so that the largest magnitude, of all or of each row, just fits."""
    limit = torch.finfo(dtype).max
    amax = (x.abs().amax(-1) if rowwise else x.abs().amax().reshape(1)).float()
    scale = (amax / limit).clamp(min=_SMALLEST)
    if rowwise:  # the next power of two
        scale = ((scale.view(torch.int32) + _FRACTION) & ~_FRACTION).view(torch.float32)
    inverse = scale.reciprocal()
    values = x.float() * (inverse.unsqueeze(-1) if rowwise else inverse)
    return Quantised(values.clamp(-limit, limit).to(dtype), scale)


def operands(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> tuple[Quantised, Quantised]:
    """x [m, k] and weight [n, k] as a recipe quantises them."""
    rowwise = recipe != "tensorwise"
    return quantised(x, E4M3, rowwise=rowwise), quantised(weight, E4M3, rowwise=rowwise)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """Return activation(x [m, k] times weight [n, k] transposed + bias); differentiable."""
    found: torch.Tensor = _Product.apply(x, weight, bias, options)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    """The product of quantised operands; its gradients are those of what they stand for."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: Options,
    ) -> torch.Tensor:
        of_x, of_weight = operands(x, weight, options.recipe)
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        exact = options.recipe == "rowwise_with_gw_hp"
        by_x = of_weight if wants_x else (None, None)
        by_weight = (None, None) if not wants_weight else (x, None) if exact else of_x
        items: list[Item] = [("scale_a", of_x.scale), ("scale_b", of_weight.scale)]
        items += [] if bias is None else [("bias", bias)]
        z = None
        if options.activation is not None:
            z = x.new_empty((x.shape[0], weight.shape[0]), dtype=options.out_dtype)
            items += [("preactivation", z), ("activation", options.activation)]
        ctx.save_for_backward(*by_x, *by_weight, z)
        ctx.options = options
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        b = of_weight.values.t()
        return gemm(of_x.values, b, epilogue=items, out_dtype=options.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, weight and bias that are wanted."""
        weight, of_weight, x, of_x, z = ctx.saved_tensors
        types, options, dx, dw, db = ctx.types, ctx.options, None, None, None
        wants_sums = ctx.needs_input_grad[2]
        dz, sums = dy, None
        if z is not None or wants_sums:
            found, sums = activation_backward(dy, z, options.activation, sums=wants_sums)
            dz = dy if found is None else found
        with torch.autocast(dy.device.type, enabled=False):
            if weight is not None:
                dx = _times(dz, Quantised(weight, of_weight), options, types[0])
            if x is not None:
                into = options.main_grad
                factor = x if of_x is None else Quantised(x, of_x)
                dw = _times(dz.t(), factor, options, types[1], into)
                dw = dw if into is None else None
            if sums is not None:
                db = sums.to(types[2])
        return dx, dw, db, None


def _times(
    gradient: torch.Tensor,
    factor: Quantised | torch.Tensor,
    options: Options,
    dtype: torch.dtype,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a gradient [.., k] times a factor [k, ..], or add the product to `into`."""
    keywords: dict[str, Any] = {"out_dtype": dtype}
    if into is not None:
        keywords = {"residual": into, "out": into, "out_dtype": into.dtype}
    if isinstance(factor, torch.Tensor):
        kind = torch.bfloat16 if factor.dtype == torch.float32 else factor.dtype
        return gemm(gradient.to(kind), factor.to(kind), **keywords)
    if options.gradient_dtype == torch.bfloat16:
        values, scale = factor.wide()
        return gemm(gradient.to(torch.bfloat16), values, scale_a=scale, **keywords)
    scale = factor.scale
    if scale.numel() > 1:  # those of rows that are added up: they belong to the gradient
        gradient, scale = gradient * scale, None
    narrow = quantised(gradient, E5M2, rowwise=options.recipe != "tensorwise")
    return gemm(narrow.values, factor.values, scale_a=narrow.scale, scale_b=scale, **keywords)
