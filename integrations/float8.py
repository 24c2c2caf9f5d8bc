"""Linear layers in fp8: operands are quantised in each call, and gradients pass straight through.

What is quantised how is a recipe's (recipes.py). Scales come from the largest magnitude there is
now, or was before; nothing waits for the GPU. Both operands of a product lie along what is summed,
as fp8 kernels want them: an operand of two products is quantised both ways, where that is possible
from one reading of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from warploom.integrations.recipes import E5M2, SCHEMES, Quantization, Recipe, Scheme
from warploom.integrations.scaling import DelayedScaling, Kept
from warploom.runtime.families._product.epilogue import Item
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.gemm.api import gemm

GRADIENT_TYPES = (torch.bfloat16, E5M2)
_INPUT, _WEIGHT, _GRADIENT = range(3)  # what has a scale of earlier steps


class Quantised(NamedTuple):
    """A matrix [m, k]: `values` times `scale`, fp32: of one element, a row each or blocks."""

    values: torch.Tensor
    scale: torch.Tensor

    def wide(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """It in bf16, and what is left to multiply with; powers of two are in the values."""
        values = self.values.to(torch.bfloat16)
        if self.scale.numel() == 1:
            return values, self.scale
        return values * self.scale.to(torch.bfloat16).unsqueeze(-1), None


Both = tuple[Quantised | None, Quantised | None]  # a matrix, and its transpose


class Options(NamedTuple):
    """What a layer asks of its products.

    gradient_dtype  what the gradient is multiplied in beside the operands of the forward product;
                    None: as the recipe says
    activation      a function of the product and its bias, by its name
    main_grad       has the weight's gradient added to it, fp32, in its place; None: autograd has it
    scaling         the scales of earlier steps, where the recipe is of these
    """

    recipe: Recipe
    gradient_dtype: torch.dtype | None
    out_dtype: torch.dtype
    activation: str | None = None
    main_grad: torch.Tensor | None = None
    scaling: DelayedScaling | None = None

    @property
    def scheme(self) -> Scheme:
        """What the recipe quantises."""
        return SCHEMES[self.recipe]


# ---- Quantising ----------------------------------------------------------------------------------


def quantised(x: torch.Tensor, how: Quantization) -> Quantised:
    """Quantise x [m, k] so that the largest magnitude of what shares a scale just fits."""
    values, scale = cast(x, how.dtype, block=how.block, pow2=how.powers_of_two)
    return Quantised(values, _of_product(scale, how))


def both_ways(x: torch.Tensor, here: Quantization | None, turned: Quantization | None) -> Both:
    """Quantise x [m, k] and its transpose, where they are wanted; by one reading if that can be."""
    if here is not None and here == turned and here.block != "row":
        values, scale, of_turned, scale_turned = cast(
            x, here.dtype, block=here.block, transpose=True, pow2=here.powers_of_two
        )
        return (
            Quantised(values, _of_product(scale, here)),
            Quantised(of_turned, _of_product(scale_turned, here)),
        )
    return (
        None if here is None else quantised(x, here),
        None if turned is None else quantised(x.t().contiguous(), turned),
    )


def _of_product(scale: torch.Tensor, how: Quantization) -> torch.Tensor:
    """Scales as products take them: a vector of rows, a matrix of blocks."""
    return scale.reshape(-1) if isinstance(how.block, str) else scale


def _delayed(
    x: torch.Tensor,
    here: Quantization | None,
    turned: Quantization | None,
    scaling: DelayedScaling,
    index: int,
) -> Both:
    """The same, by the scale of earlier steps; what there is now decides that of later ones."""
    how = here or turned
    if how is None:
        return None, None
    scale, amax = scaling.of(index)
    if turned is None:
        values, _ = cast(x, how.dtype, scale=scale, amax=amax)
        return Quantised(values, scale.reshape(1)), None
    values, _, of_turned, _ = cast(x, how.dtype, scale=scale, amax=amax, transpose=True)
    return Quantised(values, scale.reshape(1)), Quantised(of_turned, scale.reshape(1))


def operands(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> tuple[Quantised, Quantised]:
    """x [m, k] and weight [n, k] as a recipe quantises them."""
    scheme = SCHEMES[recipe]
    return quantised(x, scheme.input), quantised(weight, scheme.weight)


def multiply(
    a: Quantised,
    b: Quantised,
    *,
    items: Sequence[Item] = (),
    scheme: Scheme | None = None,
    **keywords: Any,
) -> torch.Tensor:
    """Return a [m, k] times b [n, k] transposed, and what `items` make of it."""
    accumulation = "fast" if scheme is None else scheme.accumulation
    scales: list[Item] = [("scale_a", a.scale), ("scale_b", b.scale)]
    return gemm(
        a.values, b.values.t(), epilogue=[*scales, *items], accumulation=accumulation, **keywords
    )


# ---- The product ---------------------------------------------------------------------------------


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    kept: Kept[Both],
) -> torch.Tensor:
    """Return activation(x [m, k] times weight [n, k] transposed + bias); differentiable.

    `kept` has the weight as it was quantised before.
    """
    found: torch.Tensor = _Product.apply(x, weight, bias, options, kept)  # type: ignore[no-untyped-call]
    return found


def inferred(
    x: torch.Tensor,
    weight: torch.Tensor,
    items: Sequence[Item],
    options: Options,
    kept: Kept[Both],
) -> torch.Tensor:
    """Return what `items` make of x [m, k] times weight [n, k] transposed; no gradient."""
    scaling = options.scaling
    of_weight, _ = weights(weight, options, kept, wants_x=False)
    if scaling is None:
        of_x, _ = both_ways(x, options.scheme.input, None)
    else:
        of_x, _ = _delayed(x, options.scheme.input, None, scaling, _INPUT)
    assert of_x is not None and of_weight is not None  # noqa: S101 (for type checkers)
    return multiply(of_x, of_weight, items=items, out_dtype=options.out_dtype)


def weights(weight: torch.Tensor, options: Options, kept: Kept[Both], *, wants_x: bool) -> Both:
    """A weight as the products of y and, where it is wanted, of x's gradient take it."""
    scheme = options.scheme
    turned = scheme.weight_for_grad_input if wants_x and options.gradient_dtype is None else None
    if options.scaling is not None:
        return _delayed(weight, scheme.weight, turned, options.scaling, _WEIGHT)
    return kept.of(weight, lambda: both_ways(weight, scheme.weight, turned), scheme, turned)


class _Product(torch.autograd.Function):
    """The product of quantised operands; its gradients are those of what they stand for."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: Options,
        kept: Kept[Both],
    ) -> torch.Tensor:
        scheme, own = options.scheme, options.gradient_dtype is None
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        of_weight, turned_weight = weights(weight, options, kept, wants_x=wants_x)
        turned = scheme.input_for_grad_weight if own and wants_weight else None
        if options.scaling is None:
            of_x, turned_x = both_ways(x, scheme.input, turned)
        else:
            of_x, turned_x = _delayed(x, scheme.input, turned, options.scaling, _INPUT)
        assert of_x is not None and of_weight is not None  # noqa: S101 (for type checkers)
        items: list[Item] = [] if bias is None else [("bias", bias)]
        z = None
        if options.activation is not None:
            z = x.new_empty((x.shape[0], weight.shape[0]), dtype=options.out_dtype)
            items += [("preactivation", z), ("activation", options.activation)]
        by_x = (None, None) if not wants_x else turned_weight if own else of_weight
        exact = (x, None)
        by_weight: tuple[Any, Any] = (None, None)
        if wants_weight:
            by_weight = turned_x or (exact if own or scheme.input_for_grad_weight is None else of_x)
        ctx.save_for_backward(*(by_x or (None, None)), *by_weight, z)
        ctx.options = options
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return multiply(of_x, of_weight, items=items, out_dtype=options.out_dtype)

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
        into: dict[str, Any] = {"out_dtype": types[1]}
        if options.main_grad is not None:
            into = {"out": options.main_grad, "out_dtype": options.main_grad.dtype}
        with torch.autocast(dy.device.type, enabled=False):
            by_x = None if weight is None else Quantised(weight, of_weight)
            by_weight = x if x is None or of_x is None else Quantised(x, of_x)
            if options.gradient_dtype is None:
                dx, dw = _gradients(dz, by_x, by_weight, options, {"out_dtype": types[0]}, into)
            else:
                if by_x is not None:
                    dx = _times(dz, by_x, options, types[0])
                if by_weight is not None:
                    dw = _times(dz.t(), by_weight, options, types[1], options.main_grad)
            if options.main_grad is not None:
                dw = None
            if sums is not None:
                db = sums.to(types[2])
        return dx, dw, db, None, None


def _gradients(
    dy: torch.Tensor,
    weight: Quantised | None,
    x: Quantised | torch.Tensor | None,
    options: Options,
    of_x: dict[str, Any],
    of_weight: dict[str, Any],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x and of the weight, by a recipe: from dy, and W and x as they lie then.

    Of what is None, there is no gradient.
    """
    scheme, dx, dw = options.scheme, None, None
    here = None if weight is None else scheme.grad_output
    turned = scheme.grad_output_for_grad_weight if isinstance(x, Quantised) else None
    if options.scaling is None:
        of_dy, turned_dy = both_ways(dy, here, turned)
    else:
        of_dy, turned_dy = _delayed(dy, here, turned, options.scaling, _GRADIENT)
    if weight is not None and of_dy is not None:
        dx = multiply(of_dy, weight, scheme=scheme, **of_x)
    added: list[Item] = [("residual", of_weight["out"], 1.0)] if "out" in of_weight else []
    if isinstance(x, Quantised) and turned_dy is not None:
        dw = multiply(turned_dy, x, items=added, scheme=scheme, **of_weight)
    elif isinstance(x, torch.Tensor):
        kind = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
        dw = gemm(dy.to(kind).t(), x.to(kind), epilogue=added, **of_weight)
    return dx, dw


def _times(
    gradient: torch.Tensor,
    factor: Quantised | torch.Tensor,
    options: Options,
    dtype: torch.dtype,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a gradient [.., k] times a factor [k, ..] of y's product, or add it to `into`."""
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
    by_rows = options.recipe != "tensorwise"
    how = Quantization(E5M2, "row" if by_rows else "tensor", powers_of_two=by_rows)
    narrow = quantised(gradient, how)
    return gemm(narrow.values, factor.values, scale_a=narrow.scale, scale_b=scale, **keywords)
