"""A gated feed-forward layer in fp8 as one function of autograd: down(f(x gate^T) * (x up^T)).

Weights of gate and up are one matrix, as in bf16 (runtime/families/gemm/gated_layer.py), which has
one scale where a recipe has one for a tensor. Six GEMMs, and a cast of each operand:

forward    x -> GEMM -> z, of gate and up -> cast of h = f(gate) * up -> GEMM -> y
backward   dy -> GEMM -> dh -> cast of dz, which is computed of dh and z -> GEMM -> dx
           dW of [gate; up] is dz^T x, and that of down dy^T h, of what was cast already

h, dz and their transposes are in fp8 alone: what computes them casts them. Where one orientation
is wanted, or they are in 16 bits, epilogues of the GEMMs compute them; to take a gradient past the
gate such an epilogue needs longer than the cast, which has all of memory's bandwidth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from warploom.generator.epilogue import GateFunction
from warploom.generator.families.gemm import SCALE_BLOCK
from warploom.integrations.float8 import (
    Options,
    Quantised,
    WithTranspose,
    multiply,
    weights,
    with_transpose,
)
from warploom.integrations.recipes import Scheme
from warploom.integrations.scaling import ParameterCache
from warploom.runtime.families._product.epilogue import Item
from warploom.runtime.families._product.steps.gate_gradient import gradient_kind
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.families.gemm.gated_layer import (
    Found,
    MainGrads,
    Needed,
    bias_gradient,
    biased,
    in_order,
    joined,
    whole,
)
from warploom.runtime.families.gemm.gradient_rule import Preactivation
from warploom.runtime.tensors import refuse_transforms


class Layer(NamedTuple):
    """The tensors of a layer: x [m, k], gate and up [inner, k], down [n, inner], and biases."""

    x: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class Gated(NamedTuple):
    """How a layer is computed.

    options      the recipe, and the type of results
    function     of the gate
    main_grads   where gradients of weights are added, fp32; None: autograd has them
    both, down   weights as they were quantised before
    """

    options: Options
    function: GateFunction
    preactivation: Preactivation
    main_grads: MainGrads
    both: ParameterCache[WithTranspose]
    down: ParameterCache[WithTranspose]


class _Saved(NamedTuple):
    """What the backward pass reads; None where it does not. x and h are transposed if quantised.

    Where z is computed again, `row` and `weight` are the operands that it is computed from.
    """

    x: Quantised | torch.Tensor | None = None
    h: Quantised | torch.Tensor | None = None
    z: torch.Tensor | None = None
    both_t: Quantised | None = None
    down_t: Quantised | None = None
    row: Quantised | None = None
    weight: Quantised | None = None
    bias: torch.Tensor | None = None


def gated_float8(layer: Layer, both: torch.Tensor, how: Gated) -> torch.Tensor:
    """Return the layer's output [m, n], differentiable once, where a gradient is wanted.

    Args:
        layer: Its tensors; `inner` a multiple of 8, and of 128 where scales are of blocks.
        both: The weights of gate and up as one, [2 inner, k], without a gradient.
        how: How it is computed.
    """
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in layer):
        refuse_transforms("a layer that trains in fp8")
        y: torch.Tensor = _GatedFloat8.apply(*layer, both, how)  # type: ignore[no-untyped-call]
        return y
    return _forward(layer, both, how, Needed.of([False] * len(layer)))[0]


def _forward(
    layer: Layer, both: torch.Tensor, how: Gated, needed: Needed
) -> tuple[torch.Tensor, _Saved]:
    options, scheme = how.options, how.options.scheme
    # The memory of gate and up is one, but each counts its own versions.
    versions = () if torch.compiler.is_compiling() else (layer.up._version, layer.up.data_ptr())
    of_both, both_t = weights(both, options, how.both, *versions, wants_x=needed.x)
    of_down, down_t = weights(layer.down, options, how.down, wants_x=needed.inner)
    x, x_t = with_transpose(layer.x, scheme.input, _for_weight(scheme, needed=needed.both))
    assert x is not None and of_both is not None and of_down is not None  # noqa: S101 (for type checkers)
    bias, saves, z, h = _both_bias(layer), needed.inner and how.preactivation == "save", None, None
    items, is_exact = biased(bias), scheme.input_for_grad_weight is None
    of_h: Quantised | None
    h_t: Quantised | None
    if needed.down and scheme.input == scheme.input_for_grad_weight:
        z = multiply(x, of_both, items=items, out_dtype=options.out_dtype)
        of_h, h_t = with_transpose(z, scheme.input, scheme.input, gate=how.function)
    else:
        if saves:
            z = layer.x.new_empty((len(layer.x), len(both)), dtype=options.out_dtype)
            items.append(("preactivation", z))
        items.append(("gate", how.function))
        h = multiply(x, of_both, items=items, out_dtype=options.out_dtype)
        of_h, h_t = with_transpose(h, scheme.input, _for_weight(scheme, needed=needed.down))
    assert of_h is not None  # noqa: S101 (for type checkers)
    y = multiply(of_h, of_down, items=biased(layer.down_bias), out_dtype=options.out_dtype)
    z = z if saves else None
    again = needed.inner and z is None
    return y, _Saved(
        x=layer.x if is_exact and needed.both else x_t,
        h=h if is_exact and needed.down and not needed.inner else h_t,
        z=z,
        both_t=both_t if needed.x else None,
        down_t=down_t if needed.inner else None,
        row=x if again else None,
        weight=of_both if again else None,
        bias=bias if again else None,
    )


def _backward(saved: _Saved, how: Gated, needed: Needed, types: Types, dy: torch.Tensor) -> Found:
    options, scheme = how.options, how.options.scheme
    of_dy, dy_t = with_transpose(
        dy,
        scheme.grad_output if needed.inner else None,
        scheme.grad_output_for_grad_weight if needed.down else None,
    )
    h, z, dz, dz_t, dx, both, both_bias = saved.h, saved.z, None, None, None, None, None
    if needed.inner:
        if z is None:
            assert saved.row is not None and saved.weight is not None  # noqa: S101 (for type checkers)
            items = biased(saved.bias)
            z = multiply(saved.row, saved.weight, items=items, out_dtype=options.out_dtype)
        assert of_dy is not None and saved.down_t is not None  # noqa: S101 (for type checkers)
        gradient, own = scheme.grad_output_for_grad_weight, scheme.grad_output
        of_dz: Quantised | None
        if (
            needed.x
            and needed.both
            and not needed.both_bias
            and own == gradient
            and z.shape[-1] % (2 * SCALE_BLOCK) == 0
        ):
            dh = multiply(of_dy, saved.down_t, scheme=scheme, out_dtype=options.out_dtype)
            of_dz, dz_t = with_transpose(z, own, own, gate=how.function, gradient=dh)
        else:
            dz = torch.empty_like(z)
            again = multiply(
                of_dy,
                saved.down_t,
                items=[(gradient_kind(how.function, "halves"), z, dz)],
                scheme=scheme,
                out_dtype=options.out_dtype,
            )
            h = again if h is None else h
            of_dz, dz_t = with_transpose(
                dz, own if needed.x else None, gradient if needed.both else None
            )
        if needed.x:
            assert of_dz is not None and saved.both_t is not None  # noqa: S101 (for type checkers)
            dx = multiply(of_dz, saved.both_t, scheme=scheme, out_dtype=types.x)
        if needed.both:
            both = _of_both(dz, dz_t, saved.x, how, types.weight)
        if dz is not None and needed.both_bias:
            both_bias = bias_gradient(dz, types.bias)
    down, main_grad = None, how.main_grads.down
    if needed.down:
        down = _of_weight(dy, dy_t, h, scheme, types.weight, main_grad)
    down_bias = bias_gradient(dy, types.bias) if needed.down_bias else None
    return Found(dx, both, down, both_bias, down_bias)


class Types(NamedTuple):
    """The types of gradients."""

    x: torch.dtype
    weight: torch.dtype
    bias: torch.dtype | None


def _of_both(
    dz: torch.Tensor | None,
    dz_t: Quantised | None,
    x: Quantised | torch.Tensor | None,
    how: Gated,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """The gradient of the weights of gate and up; None where it was added to tensors."""
    into, scheme = how.main_grads, how.options.scheme
    if into.gate is None and into.up is None:
        return _of_weight(dz, dz_t, x, scheme, dtype)
    if into.gate is not None and into.up is not None and joined(into.gate, into.up):
        return _of_weight(dz, dz_t, x, scheme, dtype, whole(into.gate, into.up))
    halves = []
    for index, one in enumerate((into.gate, into.up)):
        part = None if dz_t is None else _half(dz_t, index)
        exact = None if dz is None else dz.chunk(2, -1)[index]
        halves.append(_of_weight(exact, part, x, scheme, dtype, one))
    if halves[0] is None and halves[1] is None:
        return None
    like = next(one for one in halves if one is not None)
    return torch.cat([torch.zeros_like(like) if one is None else one for one in halves])


def _half(matrix: Quantised, index: int) -> Quantised:
    """Half of the rows of a matrix whose scales are of rows, of parts of them, or one."""
    scale = matrix.scale if matrix.scale.numel() == 1 else matrix.scale.chunk(2)[index]
    return Quantised(matrix.values.chunk(2)[index], scale)


def _of_weight(
    d: torch.Tensor | None,
    d_t: Quantised | None,
    x: Quantised | torch.Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype,
    into: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The gradient d^T x of a weight; None where it was added to a tensor."""
    keywords: dict[str, Any] = {"out_dtype": dtype}
    added: list[Item] = []
    if into is not None:
        keywords, added = {"out": into, "out_dtype": into.dtype}, [("residual", into, 1.0)]
    if isinstance(x, Quantised) and d_t is not None:
        product = multiply(d_t, x, items=added, scheme=scheme, **keywords)
    else:
        assert isinstance(x, torch.Tensor) and d is not None  # noqa: S101 (for type checkers)
        product = gemm(d.to(x.dtype).t(), x, epilogue=added, **keywords)
    return None if into is not None else product


def _for_weight(scheme: Scheme, *, needed: bool) -> Any:  # noqa: ANN401
    return scheme.input_for_grad_weight if needed else None


def _both_bias(layer: Layer) -> torch.Tensor | None:
    if layer.gate_bias is None or layer.up_bias is None:
        return None
    return torch.cat((layer.gate_bias.detach(), layer.up_bias.detach()))


class _GatedFloat8(torch.autograd.Function):
    """The layer; its gradients are those of what its quantised operands stand for."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        both: torch.Tensor,
        how: Gated,
    ) -> torch.Tensor:
        layer = Layer(x, gate, up, down, gate_bias, up_bias, down_bias)
        ctx.needed = Needed.of(ctx.needs_input_grad[: len(layer)])
        y, saved = _forward(layer, both, how, ctx.needed)
        ctx.kinds = [type(one) is Quantised for one in saved]
        ctx.save_for_backward(
            *(part for one in saved for part in (one if type(one) is Quantised else (one,)))
        )
        ctx.how = how
        bias = down_bias if gate_bias is None else gate_bias
        ctx.types = Types(x.dtype, down.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients that are wanted."""
        parts = iter(ctx.saved_tensors)
        saved = _Saved(*(_next(parts, is_pair) for is_pair in ctx.kinds))
        with torch.autocast(dy.device.type, enabled=False):
            gradients = _backward(saved, ctx.how, ctx.needed, ctx.types, dy.contiguous())
        return *in_order(gradients, ctx.needs_input_grad, ctx.how.main_grads), None, None


def _next(parts: Any, is_pair: bool) -> Any:  # noqa: ANN401
    """The next tensor, or quantised matrix, of some."""
    return Quantised(next(parts), next(parts)) if is_pair else next(parts)
