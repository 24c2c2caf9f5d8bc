"""Experts that train in fp8 with block scales: a grouped GEMM whose gradients are ones of e4m3.

forward    y of a group is x W^T: x by blocks of 1x128, W by blocks of 128x128
backward   dx is dy W, of W transposed, which is cast with W from one reading of memory
           dW is dy^T x, whose k are the tokens of an expert. The casts of x and dy write both
           orientations; in the transposes each expert's tokens begin at a multiple of 128, so that
           no block of scales has tokens of two experts

A layer with a gate is one function of autograd, as a gated linear layer is (float8_gated.py): what
the gate makes, and the gradient of gate and up, are in fp8 alone, and the casts compute them.

Where the experts of tokens begin only the device knows. Numerics are those of linear layers with
the same recipe, and of Transformer Engine's GroupedLinear with Float8BlockScaling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from warploom.generator.families.gemm import SCALE_BLOCK
from warploom.integrations.float8 import Quantised
from warploom.integrations.linear_rules import PRODUCTS
from warploom.integrations.recipes import SCHEMES, Quantization, Recipe
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.cast.checks import GATES
from warploom.runtime.families.gemm.grouped import grouped_gemm
from warploom.runtime.tensors import refuse_transforms

RECIPES: tuple[Recipe, ...] = ("blockwise",)
"""The recipes that experts train with."""

ALIGNMENT = 16
"""Elements of a row of a weight in fp8: the 16 bytes that TMA asks for."""

_ONES = 8  # rows of a GEMM that sums up rows: 16 bytes


class Rows(NamedTuple):
    """Rows of experts [s, k] in fp8; if groups are wanted, their transpose, and where groups end in
    it.
    """

    own: Quantised
    transposed: Quantised | None = None
    ends: torch.Tensor | None = None


class Weights(NamedTuple):
    """A weight in fp8, contiguous along what is summed: [E, N, K] for the GEMM of y, and [E, K, N]
    for the gradient of x.
    """

    of_y: Quantised
    of_dx: Quantised


def quantised_rows(
    x: torch.Tensor, how: Quantization, offsets: torch.Tensor | None, **gated: Any
) -> Rows:
    """Quantise rows, and their transpose by groups that end at `offsets`, if there are some.

    `gated` are the gate of which, and the gradient by which, `cast` takes x.
    """
    if offsets is None:
        return Rows(Quantised(*cast(x, how.dtype, block=how.block, pow2=how.powers_of_two)))
    values, scale, values_t, scale_t, ends = cast(
        x,
        how.dtype,
        block=how.block,
        transpose=True,
        pow2=how.powers_of_two,
        offsets=offsets,
        **gated,
    )
    return Rows(Quantised(values, scale), Quantised(values_t, scale_t), ends)


def quantised_weights(weight: torch.Tensor, how: Quantization) -> Weights:
    """Quantise the matrices [E, K, N] of experts, which are read once wherever they are stored.

    Blocks of 128x128 begin anew with each expert: where rows are no multiple of 128 a copy with
    zeros is cast.
    """
    own, is_outputs_first = _stored(weight)
    experts, rows, _ = own.shape
    padded = -(-rows // SCALE_BLOCK) * SCALE_BLOCK
    if padded > rows:
        own = functional.pad(own, (0, 0, 0, padded - rows))
    values, scale, values_t, _ = cast(
        own.flatten(0, 1), how.dtype, block=how.block, transpose=True, pow2=how.powers_of_two
    )
    columns = own.shape[2]
    scale = scale.view(experts, padded // SCALE_BLOCK, -1)
    values = values.view(experts, padded, columns)[:, :rows]
    values_t = values_t.view(columns, experts, padded).transpose(0, 1)[..., :rows]
    both = Quantised(values, scale), Quantised(values_t, scale.mT)
    return Weights(*(both if is_outputs_first else both[::-1]))


def _stored(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Matrices [E, K, N] as they are stored, and whether outputs come first there."""
    is_outputs_first = weight.stride(-2) == 1
    return (weight.mT if is_outputs_first else weight), is_outputs_first


def multiply(
    rows: Quantised, weight: Quantised, offsets: torch.Tensor, **keywords: Any
) -> torch.Tensor:
    """Return the rows [s, k] of each group times its matrix [n, k] transposed."""
    return grouped_gemm(
        rows.values,
        weight.values.mT,
        offs=offsets,
        scale_a=rows.scale,
        scale_b=weight.scale,
        **keywords,
    )


def weight_gradient(
    dy_t: Quantised, x_t: Quantised, ends: torch.Tensor, dtype: torch.dtype, *, outputs_first: bool
) -> torch.Tensor:
    """Return the gradient [E, K, N] of matrices, stored as these are: x^T dy of each group."""
    left, right = (dy_t, x_t) if outputs_first else (x_t, dy_t)
    found = grouped_gemm(
        left.values,
        right.values.t(),
        offs=ends,
        scale_a=left.scale,
        scale_b=right.scale,
        out_dtype=dtype,
    )
    return found.mT if outputs_first else found


def bias_gradient(dy: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sums of the rows of each group, as a GEMM with a matrix of ones."""
    dy = dy.to(torch.bfloat16) if dy.dtype == torch.float32 else dy
    ones = dy.new_ones(dy.shape[0], _ONES)
    return grouped_gemm(ones.t(), dy, offs=offsets, out_dtype=torch.float32)[:, 0].to(dtype)


def float8_grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    **steps: Any,
) -> torch.Tensor:
    """Multiply the rows of each expert by its matrix [E, K, N], in fp8; differentiable once.

    Args:
        rows: [S, K], bf16, fp16 or fp32.
        weight: [E, K, N], of 16 bits or fp32; K and N are multiples of 16.
        offsets: int32 [E]: where the rows of each expert end. Rows behind the last are not read,
            those of the result are undefined, and their gradient is zeros.
        bias: [E, N], or None.
        recipe: One of RECIPES.
        steps: A gate that kernels have, where no gradient is wanted.
    """
    given = (rows, weight, bias)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given):
        refuse_transforms("experts that train in fp8")
        found: torch.Tensor = _Grouped.apply(*given, offsets, recipe)  # type: ignore[no-untyped-call]
        return found
    scheme = SCHEMES[recipe]
    of_y = quantised_weights(weight, scheme.weight).of_y
    own = quantised_rows(rows, scheme.input, None).own
    return multiply(own, of_y, offsets, bias=bias, out_dtype=rows.dtype, **steps)


class _Grouped(torch.autograd.Function):
    """The rows of experts times their matrices; gradients are those of what is quantised."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        offsets: torch.Tensor,
        recipe: Recipe,
    ) -> torch.Tensor:
        scheme = SCHEMES[recipe]
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        of_y, of_dx = quantised_weights(weight, scheme.weight)
        x = quantised_rows(rows, scheme.input, offsets if needs_weight else None)
        ctx.save_for_backward(
            *(of_dx if needs_rows else (None, None)),
            *(x.transposed or (None, None)),
            *(x.ends, offsets),
        )
        ctx.recipe, (_, ctx.outputs_first) = recipe, _stored(weight)
        ctx.types = rows.dtype, weight.dtype, None if bias is None else bias.dtype
        return multiply(x.own, of_y, offsets, bias=bias, out_dtype=rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of rows, weight and bias that are wanted."""
        weight, weight_scale, x_t, x_scale, ends, offsets = ctx.saved_tensors
        scheme, (of_rows, of_weight, of_bias) = SCHEMES[ctx.recipe], ctx.types
        dx, dw, db = None, None, None
        with torch.autocast(dy.device.type, enabled=False):
            if weight is not None or x_t is not None:
                d = quantised_rows(dy, scheme.grad_output, None if x_t is None else offsets)
                if weight is not None:
                    out = dy.new_zeros((dy.shape[0], weight.shape[1]), dtype=of_rows)
                    dx = multiply(d.own, Quantised(weight, weight_scale), offsets, out=out)
                if x_t is not None and d.transposed is not None:
                    dw = weight_gradient(
                        *(d.transposed, Quantised(x_t, x_scale), ends, of_weight),
                        outputs_first=ctx.outputs_first,
                    )
            if ctx.needs_input_grad[2] and of_bias is not None:
                db = bias_gradient(dy, offsets, of_bias)
        return dx, dw, db, None, None


# ---- Layers with a gate --------------------------------------------------------------------------


class Layer(NamedTuple):
    """The tensors of a layer: rows [S, H], weights [E, H, 2 I] and [E, I, H], and biases."""

    rows: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def is_gated_by_casts(layer: Layer, gate: object, gate_layout: object) -> bool:
    """Whether casts compute the gate of a layer that trains, and its gradient.

    A bias of gate and up that trains needs their gradient in 16 bits.
    """
    bias = layer.gate_up_bias
    return (
        torch.is_grad_enabled()
        and layer.gate_up.requires_grad
        and layer.down.requires_grad
        and not (bias is not None and bias.requires_grad)
        and gate in GATES
        and gate_layout == "halves"
        and layer.rows.dtype in PRODUCTS
        and layer.gate_up.shape[2] % (2 * SCALE_BLOCK) == 0
    )


def float8_gated_experts(
    layer: Layer, offsets: torch.Tensor, gate: str, recipe: Recipe
) -> torch.Tensor:
    """Return down(f(gate) * up) of the rows of each expert, in fp8; differentiable once.

    Args:
        layer: Its tensors, of which both weights require a gradient.
        offsets: int32 [E]: where the rows of each expert end.
        gate: f, one of relu, gelu, gelu_tanh and silu; halves of 2 I are gate and up.
        recipe: One of RECIPES.
    """
    refuse_transforms("experts that train in fp8")
    found: torch.Tensor = _Gated.apply(*layer, offsets, gate, recipe)  # type: ignore[no-untyped-call]
    return found


class _Gated(torch.autograd.Function):
    """Both GEMMs of a layer with the gate between them."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        offsets: torch.Tensor,
        gate: str,
        recipe: Recipe,
    ) -> torch.Tensor:
        scheme, kind = SCHEMES[recipe], rows.dtype
        first, second = (quantised_weights(one, scheme.weight) for one in (gate_up, down))
        x = quantised_rows(rows, scheme.input, offsets)
        z = multiply(x.own, first.of_y, offsets, bias=gate_up_bias, out_dtype=kind)
        h = quantised_rows(z, scheme.input, offsets, gate=gate)
        y = multiply(h.own, second.of_y, offsets, bias=down_bias, out_dtype=kind)
        assert x.transposed is not None and h.transposed is not None  # noqa: S101 (for type checkers)
        of_dx = first.of_dx if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(
            *(*x.transposed, *h.transposed, x.ends, z, *of_dx, *second.of_dx, offsets)
        )
        ctx.gate, ctx.recipe = gate, recipe
        ctx.outputs_first = _stored(gate_up)[1], _stored(down)[1]
        ctx.types = gate_up.dtype, down.dtype, None if down_bias is None else down_bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of rows, weights and the second bias."""
        x, x_scale, h, h_scale, ends, z, first, first_scale, *others = ctx.saved_tensors
        second, second_scale, offsets = others
        how, dx, db = SCHEMES[ctx.recipe].grad_output, None, None
        with torch.autocast(dy.device.type, enabled=False):
            d = quantised_rows(dy, how, offsets)
            dh = multiply(d.own, Quantised(second, second_scale), offsets, out_dtype=z.dtype)
            dz = quantised_rows(z, how, offsets, gate=ctx.gate, gradient=dh)
            assert d.transposed is not None and dz.transposed is not None  # noqa: S101
            if first is not None:
                out = dy.new_zeros(dy.shape[0], first.shape[1])
                dx = multiply(dz.own, Quantised(first, first_scale), offsets, out=out)
            pairs = (dz.transposed, Quantised(x, x_scale)), (d.transposed, Quantised(h, h_scale))
            of_gate_up, of_down = (
                weight_gradient(*pair, ends, kind, outputs_first=outputs_first)
                for pair, kind, outputs_first in zip(
                    pairs, ctx.types[:2], ctx.outputs_first, strict=True
                )
            )
            if ctx.needs_input_grad[4]:
                db = bias_gradient(dy, offsets, ctx.types[2])
        return dx, of_gate_up, of_down, None, db, None, None, None
