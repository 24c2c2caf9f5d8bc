"""Linear layers in fp8: operands are quantised in each call, and gradients pass straight through.

A recipe says what is quantised, and how (recipes.py). Scales come from the largest magnitude of the
operand now, or of earlier steps; nothing waits for the GPU. Kernels want both operands of a GEMM
contiguous along what is summed, so an operand of two GEMMs is quantised with its transpose, from
one reading of memory where that is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from warploom.integrations.float8_sharding import GatheredWeight, unwrapped
from warploom.integrations.recipes import E5M2, SCHEMES, Quantization, Recipe, Scheme
from warploom.integrations.scaling import DelayedScaling, ParameterCache
from warploom.runtime.families._product.epilogue import Item
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.tensors import refuse_transforms

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


WithTranspose = tuple[Quantised | None, Quantised | None]  # a matrix, and its transpose


class Options(NamedTuple):
    """What a layer asks of its GEMMs.

    gradient_dtype  the type of the gradient, which is multiplied with the operands of the forward
                    GEMM; None: as the recipe says
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
    return Quantised(values, _of_gemm(scale, how))


def with_transpose(
    x: torch.Tensor, own: Quantization | None, transposed: Quantization | None, **gated: Any
) -> WithTranspose:
    """Quantise x [m, k] and its transpose, where they are wanted; by one reading if that can be.

    `gated` are the gate of which, and the gradient by which, `cast` takes x: where both are wanted
    alike.
    """
    if own is not None and own == transposed:
        values, scale, values_t, scale_t = cast(
            x, own.dtype, block=own.block, transpose=True, pow2=own.powers_of_two, **gated
        )
        return (
            Quantised(values, _of_gemm(scale, own)),
            Quantised(values_t, _of_gemm(scale_t, own)),
        )
    return (
        None if own is None else quantised(x, own),
        None if transposed is None else quantised(x.t().contiguous(), transposed),
    )


def _of_gemm(scale: torch.Tensor, how: Quantization) -> torch.Tensor:
    """Scales as `gemm` takes them: a vector of rows, a matrix of blocks."""
    return scale.reshape(-1) if isinstance(how.block, str) else scale


def _scaled(
    x: torch.Tensor,
    own: Quantization | None,
    transposed: Quantization | None,
    scaling: DelayedScaling | None,
    index: int,
) -> WithTranspose:
    """The same; by the scale of earlier steps, where the recipe has such, one for both.

    What is the largest magnitude now then decides the scale of later steps.
    """
    how = own or transposed
    if scaling is None or how is None:
        return with_transpose(x, own, transposed)
    scale, amax = scaling.of(index)
    one = scale.reshape(1)
    if transposed is None:
        values, _ = cast(x, how.dtype, scale=scale, amax=amax)
        return Quantised(values, one), None
    values, _, values_t, _ = cast(x, how.dtype, scale=scale, amax=amax, transpose=True)
    return Quantised(values, one), Quantised(values_t, one)


def operands(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> tuple[Quantised, Quantised]:
    """x [m, k] and weight [n, k] as a recipe quantises them."""
    scheme = SCHEMES[recipe]
    return quantised(x, scheme.input), quantised(unwrapped(weight), scheme.weight)


def multiply(
    a: Quantised,
    b: Quantised,
    *,
    items: Sequence[Item] = (),
    scheme: Scheme | None = None,
    **keywords: Any,
) -> torch.Tensor:
    """Return a [m, k] times b [n, k] transposed, and what `items` make of it."""
    is_fast = scheme is None or scheme.accumulation == "fast"
    scales: list[Item] = [("scale_a", a.scale), ("scale_b", b.scale)]
    return gemm(
        a.values, b.values.t(), epilogue=[*scales, *items], use_fast_accum=is_fast, **keywords
    )


# ---- The GEMM ------------------------------------------------------------------------------------


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
    refuse_transforms("a layer that trains in fp8")
    found: torch.Tensor = _Product.apply(x, weight, bias, options, cache)  # type: ignore[no-untyped-call]
    return found


def inferred(
    x: torch.Tensor,
    weight: torch.Tensor,
    items: Sequence[Item],
    options: Options,
    cache: ParameterCache[WithTranspose],
) -> torch.Tensor:
    """Return what `items` make of x [m, k] times weight [n, k] transposed; no gradient."""
    of_weight, _ = weights(weight, options, cache, wants_x=False)
    of_x, _ = _scaled(x, options.scheme.input, None, options.scaling, _INPUT)
    assert of_x is not None and of_weight is not None  # noqa: S101 (for type checkers)
    return multiply(of_x, of_weight, items=items, out_dtype=options.out_dtype)


def weights(
    weight: torch.Tensor,
    options: Options,
    cache: ParameterCache[WithTranspose],
    *versions: object,
    wants_x: bool,
) -> WithTranspose:
    """A weight as the GEMMs of y and, where it is wanted, of the gradient of x take it.

    `versions` are what else the cached weight is of, beside the parameter's own version.
    """
    scheme, scaling = options.scheme, options.scaling
    is_transposed = wants_x and options.gradient_dtype is None
    transposed = scheme.weight_for_grad_input if is_transposed else None
    if isinstance(weight, GatheredWeight):
        values, scale = weight.eight_bits, weight.scale.reshape(1)
        across = None if transposed is None else Quantised(values.t().contiguous(), scale)
        return Quantised(values, scale), across
    weight = unwrapped(weight)

    def compute() -> WithTranspose:
        return _scaled(weight, scheme.weight, transposed, scaling, _WEIGHT)

    if scaling is not None:  # which each step changes
        return compute()
    return cache.get(weight, compute, scheme, transposed, *versions)


class _Product(torch.autograd.Function):
    """The product of quantised operands; its gradients are those of what they stand for."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: Options,
        cache: ParameterCache[WithTranspose],
    ) -> torch.Tensor:
        scheme, own = options.scheme, options.gradient_dtype is None
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        of_weight, weight_t = weights(weight, options, cache, wants_x=wants_x)
        transposed = scheme.input_for_grad_weight if own and wants_weight else None
        of_x, x_t = _scaled(x, scheme.input, transposed, options.scaling, _INPUT)
        assert of_x is not None and of_weight is not None  # noqa: S101 (for type checkers)
        items: list[Item] = [] if bias is None else [("bias", bias)]
        z = None
        if options.activation is not None:
            z = x.new_empty((x.shape[0], weight.shape[0]), dtype=options.out_dtype)
            items += [("preactivation", z), ("activation", options.activation)]
        by_x = (None, None) if not wants_x else weight_t if own else of_weight
        exact = (x, None)
        by_weight: tuple[Any, Any] = (None, None)
        if wants_weight:
            by_weight = x_t or (exact if own or scheme.input_for_grad_weight is None else of_x)
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
    """The gradients of x and of the weight, by a recipe: from dy, W^T and x^T as they were saved.

    There is none of x without a weight, and none of the weight without an x.
    """
    scheme, dx, dw = options.scheme, None, None
    own = None if weight is None else scheme.grad_output
    transposed = scheme.grad_output_for_grad_weight if isinstance(x, Quantised) else None
    of_dy, dy_t = _scaled(dy, own, transposed, options.scaling, _GRADIENT)
    if weight is not None and of_dy is not None:
        dx = multiply(of_dy, weight, scheme=scheme, **of_x)
    added: list[Item] = [("residual", of_weight["out"], 1.0)] if "out" in of_weight else []
    if isinstance(x, Quantised) and dy_t is not None:
        dw = multiply(dy_t, x, items=added, scheme=scheme, **of_weight)
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
