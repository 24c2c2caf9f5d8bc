"""`warploom.experts`: the feed-forward layer of a mixture of experts.

Tokens are copied to the rows of their experts, multiplied by groups whose sizes only the device
knows, and summed again: one captured CUDA graph serves every routing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn import functional

from warploom.arguments import is_finite, is_number, require_boolean
from warploom.errors import ProblemError
from warploom.generator.epilogue import GateFunction, GateLayout
from warploom.generator.families.gemm import SCALE_BLOCK
from warploom.generator.families.route.schedule import EXPERTS
from warploom.integrations import float8_experts
from warploom.integrations.frozen_experts import Gate, frozen_grouped_linear
from warploom.integrations.linear_rules import PRODUCTS
from warploom.integrations.recipes import Recipe
from warploom.quantization import PackedExperts
from warploom.runtime.families._product.groups import in_groups
from warploom.runtime.families._product.steps.gate import (
    ALPHA,
    GATES,
    LAYOUTS,
    LIMIT,
    SWIGLU_OAI,
    activated,
    factor,
    has_kernel,
    split,
)
from warploom.runtime.families.combine.api import combine, permute
from warploom.runtime.families.gemm.block_scales import TYPES as BLOCK_SCALES
from warploom.runtime.families.gemm.block_scales import blocks_of
from warploom.runtime.families.gemm.grouped import grouped_gemm
from warploom.runtime.families.route.api import route
from warploom.runtime.tensors import lowered, require_one_device, require_tensors, shown

Function = Callable[[torch.Tensor], torch.Tensor]

_TYPES = (*PRODUCTS, torch.float32)
_FP8 = torch.float8_e4m3fn
_ALIGNMENT = 8  # elements of a row: 16 bytes of 16-bit types


def experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | PackedExperts,
    down: torch.Tensor | PackedExperts,
    *,
    gate: str | Function = "silu",
    gate_layout: GateLayout = "halves",
    transposed: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    first_expert: int | None = None,
    norm: Function | None = None,
    recipe: Recipe | None = None,
) -> torch.Tensor:
    """Run each token through the experts that it chose, and sum their results by its weights.

    `out[t] = sum over j of weights[t, j] * down[e] (f(gate) * up)` with e = ids[t, j], and gate and
    up the halves of `gate_up[e] hidden[t]`. It is differentiable, but not in weights that are
    quantized, and never waits for the device.

    Args:
        hidden: Tokens [.., H].
        ids: The experts of each token, int64 or int32 [.., k]; -1 is none, and adds nothing.
        weights: Of these experts, fp16, bf16 or fp32 [.., k].
        gate_up: [E, 2 I, H], at most 1,024 experts; [E, H, 2 I] where transposed. bf16, fp16 or
            fp32, e4m3 with scales, or PackedExperts, as must be down.
        down: [E, H, I]; [E, I, H] where transposed. H and I are multiples of 8.
        gate: f: silu, gelu, gelu_tanh, relu, or swiglu_oai (gpt-oss's, by alpha and limit). Or a
            function of the first GEMM's result [rows, N] that returns [rows, I], for any N.
        gate_layout: "halves", or "interleaved" where rows of gate and up take turns.
        transposed: Weights have their inputs first.
        gate_up_bias: [E, 2 I], or None.
        down_bias: [E, H], or None.
        gate_up_scale: Of an e4m3 weight, fp32 or e8m0 [E, 2 I / 128, H / 128], rounded up: one for
            each 128x128. Tokens are quantized by blocks of 1x128.
        down_scale: Likewise, [E, H / 128, I / 128].
        alpha: Of swiglu_oai: f(g) = g sigmoid(alpha g).
        limit: Of swiglu_oai: gate is at most this, and up between minus this and this.
        first_expert: The id of the first of these experts, where other ranks have the others, which
            add nothing here. None: it is 0, and ids that are no expert's are refused on the CPU,
            and add nothing on a GPU, whose contents the host does not read.
        norm: A function of the rows [rows, H] of the second GEMM, before they are weighted.
        recipe: "blockwise" trains in fp8: tokens, weights and gradients are quantized in each
            call, by blocks of 1x128 and 128x128, for all GEMMs of both passes. H and I are
            multiples of 16. None: GEMMs are of 16 bits.

    Returns:
        [.., H], of the type of hidden.

    Weights of 16 bits are multiplied by kernels; fp32 ones by torch, unless there is a recipe.
    PackedExperts and e4m3 weights are multiplied by tokens of 16 bits, and are frozen: hidden,
    weights and biases get gradients, once. The gate of PackedExperts runs in the first kernel where
    gate and up are interleaved, also where a gradient is wanted: the backward pass computes the
    first GEMM again. For the gradient of hidden it dequantizes weights, up to 1 GiB in 16 bits at a
    time. Under autocast tensors are converted, as torch converts those of linear layers.

    Raises:
        ProblemError: Before anything is launched, naming the value and the fix; for ids that are no
            expert's where they are on the CPU.

    Example:
        >>> hidden = torch.randn(6, 64).bfloat16()
        >>> chosen, ids = torch.randn(6, 4).softmax(-1).topk(2)
        >>> gate_up, down = torch.randn(4, 96, 64).bfloat16(), torch.randn(4, 64, 48).bfloat16()
        >>> warploom.experts(hidden, ids, chosen, gate_up, down).shape
        torch.Size([6, 64])
    """
    given: dict[str, torch.Tensor] = {"hidden": hidden, "ids": ids, "weights": weights}
    for name, weight in (("gate_up", gate_up), ("down", down)):
        given[name] = weight.slabs if isinstance(weight, PackedExperts) else weight
    scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    _check_types(given, {**biases, **scales}, alpha, limit, transposed)
    kind, shape = hidden.dtype, hidden.shape
    alpha, limit = float(alpha), float(limit)  # for torch, which takes no fractions
    hidden, ids, weights = (one.flatten(0, -2) for one in (hidden, ids, weights))
    gate_up, down = _lowered(gate_up), _lowered(down)
    if isinstance(gate_up, torch.Tensor) and gate_up.dtype in _TYPES:
        hidden = hidden.to(gate_up.dtype)
    else:
        hidden = lowered(hidden)
    first, second = (_inputs_first(one, transposed) for one in (gate_up, down))
    _check(hidden, ids, weights, first, second, gate, gate_layout, norm)
    if recipe is not None:
        _check_recipe(recipe, first, second)
    _check_scales(hidden, {"gate_up": first, "down": second}, scales, transposed)
    _check_bias("gate_up_bias", gate_up_bias, first)
    _check_bias("down_bias", down_bias, second)

    offsets, _, inverse = route(ids, len(first), first_expert=first_expert)
    rows = permute(hidden, inverse, offsets=offsets)
    layer = float8_experts.Layer(rows, first, second, gate_up_bias, down_bias)
    if recipe is not None and float8_experts.is_gated_by_casts(layer, gate, gate_layout):
        result = float8_experts.float8_gated_experts(layer, offsets, cast("str", gate), recipe)
    else:
        read = (first, gate_up_bias)
        fused = None
        if _is_fused(gate, gate_layout, rows, read, transposed, alpha, limit, recipe):
            numbers = (alpha, limit) if gate == SWIGLU_OAI else ()
            fused = Gate(cast("GateFunction", gate), gate_layout, *numbers)
        gated = grouped_linear(rows, first, offsets, gate_up_bias, gate_up_scale, recipe, fused)
        if fused is None:
            gated = _gated(gated, offsets, gate, gate_layout, alpha, limit)
            if callable(gate):
                _check_returned("gate", gated, (rows.shape[0], _described(second).shape[1]))
        inner = gated.to(rows.dtype)
        result = grouped_linear(inner, second, offsets, down_bias, down_scale, recipe)
    if norm is not None:
        normed = norm(_within(result, offsets))
        _check_returned("norm", normed, result.shape)
        result = normed
    return combine(result, inverse, weights, offsets=offsets).to(kind).reshape(shape)


def _lowered(weight: torch.Tensor | PackedExperts) -> Any:  # noqa: ANN401
    """A weight as autocast converts it; quantized ones stay as they are."""
    return lowered(weight) if isinstance(weight, torch.Tensor) else weight


def _inputs_first(weight: torch.Tensor | PackedExperts, transposed: bool) -> Any:  # noqa: ANN401
    """Matrices [E, K, N], or quantized weights of these."""
    if transposed and isinstance(weight, PackedExperts):
        _refuse(
            f"transposed True with {weight!r}",
            "must be False: quantized weights have their outputs first",
            "leave it out",
        )
    if transposed or isinstance(weight, PackedExperts) or weight.dim() < 2:
        return weight
    return weight.mT


def _gated(
    both: torch.Tensor,
    offsets: torch.Tensor,
    gate: str | Function,
    layout: GateLayout,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """The gate's results, by torch, of the first product [rows, 2 I]."""
    if callable(gate):  # whose parameters might have a gradient of rows that are no token's
        return gate(_within(both, offsets))
    return gate_function(both, gate, layout, alpha, limit)


def grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor | PackedExperts,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    gate: Gate | None = None,
) -> torch.Tensor:
    """Multiply the rows of each expert by its matrix [E, K, N]: by kernels, fp32 by torch.

    `scale` are the block scales of e4m3 matrices, `recipe` is one of training in fp8, and `gate`
    one that kernels have. Rows behind the last offset are undefined.
    """
    if isinstance(weight, PackedExperts) or scale is not None:
        return frozen_grouped_linear(rows, weight, offsets, bias, scale, gate)
    steps = {} if gate is None else gate.steps()
    if recipe is not None:
        return float8_experts.float8_grouped_linear(rows, weight, offsets, bias, recipe, **steps)
    if rows.dtype in PRODUCTS:
        return grouped_gemm(rows, weight, offs=offsets, bias=bias, **steps)
    # torch leaves the gradient of what is behind the last offset undefined: here it is zeros.
    product = functional.grouped_mm(_within(rows, offsets), _readable(weight), offs=offsets)
    if bias is None:
        return product
    places = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
    group = torch.searchsorted(offsets, places, right=True).clamp(max=weight.shape[0] - 1)
    return _within(product + bias[group], offsets)


def _readable(weight: torch.Tensor) -> torch.Tensor:
    """A weight of fp32 whose rows or columns begin at multiples of 16 bytes, as torch asks."""
    for along, across in ((-1, -2), (-2, -1)):
        pitch = weight.stride(across)
        if weight.stride(along) == 1 and pitch >= weight.shape[along] and pitch % 4 == 0:
            return weight
    return weight.contiguous()


def gate_function(
    both: torch.Tensor, gate: str, layout: GateLayout, alpha: float, limit: float
) -> torch.Tensor:
    """f(gate) * up, of both [rows, 2 I]."""
    function, (one, up) = cast("GateFunction", gate), split(both, layout)
    return activated(function, one, alpha, limit) * factor(function, up, limit)


def _is_fused(
    gate: object,
    layout: GateLayout,
    rows: torch.Tensor,
    read: tuple[torch.Tensor | PackedExperts | None, ...],
    transposed: bool,
    alpha: float,
    limit: float,
    recipe: Recipe | None,
) -> bool:
    """Whether the first GEMM's kernel has the gate.

    A gradient needs what comes before the gate: of weights that are frozen it is computed again.
    """
    if callable(gate) or not has_kernel(gate, alpha, limit):
        return False
    weight = read[0]
    if isinstance(weight, PackedExperts):
        return layout == "interleaved"
    if rows.dtype not in PRODUCTS or transposed:
        return False
    is_fp8 = weight is not None and (weight.dtype == _FP8 or recipe is not None)
    if weight is not None and is_fp8 and weight.shape[-1] % SCALE_BLOCK:
        return False  # what a tile has of gate and up must share a scale
    if weight is not None and weight.dtype == _FP8:
        return True
    graded = any(isinstance(one, torch.Tensor) and one.requires_grad for one in (rows, *read))
    return not (torch.is_grad_enabled() and graded)


def _within(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The rows, zeros where they have no group."""
    return torch.where(in_groups(rows.shape[0], offsets)[:, None], rows, 0)


# ---- Checks --------------------------------------------------------------------------------------


def _described(weight: torch.Tensor | PackedExperts) -> torch.Tensor:
    """A tensor with the extents of a weight that has its inputs first."""
    if isinstance(weight, torch.Tensor):
        return weight
    experts, outputs, inputs = weight.shape
    return weight.slabs.new_empty((experts, inputs, outputs), device="meta")


def _check_types(
    given: dict[str, torch.Tensor],
    biases: dict[str, torch.Tensor | None],
    alpha: object,
    limit: object,
    transposed: object,
) -> None:
    """Raise ProblemError for what are no tensors or numbers, and tensors on several devices."""
    if not torch.compiler.is_dynamo_compiling():
        require_tensors("warploom.experts", [*given.items(), *biases.items()], [*given])
        for name, value in (("alpha", alpha), ("limit", limit)):
            unlimited = name == "limit" and is_number(value) and value == math.inf
            if not is_finite(value) and not unlimited:
                _refuse(
                    f"{name} {shown(value)}", "must be a number, finite in fp32", "pass a float"
                )
        require_boolean("transposed", transposed)
    if not given["hidden"].is_floating_point():
        _refuse(
            f"hidden of {shown(given['hidden'].dtype)}",
            "must be floating-point, as the result is",
            "convert it to the type of the weights",
        )
    named = [(name, one) for name, one in {**given, **biases}.items() if one is not None]
    require_one_device(named)
    for name in ("hidden", "ids", "weights"):
        if given[name].dim() < 2:
            _refuse(
                f"{name} {_extents(given[name])}",
                f"must be [.., {'H' if name == 'hidden' else 'k'}], a row for each token",
                f"use {name}[None] for a single token",
            )


def _check_bias(name: str, bias: torch.Tensor | None, weight: torch.Tensor | PackedExperts) -> None:
    """Raise ProblemError for a bias of another shape than its matrices [E, K, N] ask for."""
    experts, _, outputs = _described(weight).shape
    shape = (experts, outputs)
    if bias is not None and (bias.shape != shape or bias.dtype not in _TYPES):
        _refuse(
            f"{name} {_extents(bias)} of {shown(bias.dtype)}",
            f"must be {[*shape]} of bfloat16, float16 or float32: a row for each expert",
            "use bias.expand(experts, -1) for one of all experts",
        )


def _check(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | PackedExperts,
    down: torch.Tensor | PackedExperts,
    gate: object,
    gate_layout: object,
    norm: object,
) -> None:
    """Raise ProblemError for tensors that are no layer's. Matrices have their inputs first."""
    if isinstance(gate_up, PackedExperts) or isinstance(down, PackedExperts):
        _check_quantized(hidden, gate_up, down)
    first, second = _described(gate_up), _described(down)
    if first.dim() != 3 or second.dim() != 3 or first.shape[1] != hidden.shape[1]:
        _refuse(
            f"gate_up {_extents(first)}, down {_extents(second)} with tokens of {hidden.shape[1]}",
            "must be [E, 2 I, H] and [E, H, I], with H the elements of a token",
            "pass transposed=True for weights [E, H, 2 I] and [E, I, H]",
        )
    count, inner = second.shape[:2]
    if count != first.shape[0] or second.shape[2] != hidden.shape[1]:
        _refuse(
            f"gate_up {_extents(first)}, down {_extents(second)} (inputs first)",
            f"must be of as many experts, and down must end in {hidden.shape[1]} elements",
            "pass both weights of one layer",
        )
    if not callable(gate) and first.shape[2] != 2 * inner:
        _refuse(
            f"gate_up {_extents(first)}, down {_extents(second)} (inputs first)",
            f"gate_up must end in {2 * inner} elements, gate and up",
            "for experts without a gate pass gate=, a function of the first product",
        )
    if not callable(gate) and gate not in GATES:
        _refuse(
            f"gate {gate!r}",
            f"must be one of {', '.join(GATES)}, or a function",
            "pass a function of the first product [rows, 2 I] that returns [rows, I]",
        )
    if norm is not None and not callable(norm):
        _refuse(
            f"norm {shown(norm)} of type {type(norm).__name__}",
            "must be a function of the rows of the second product, or None",
            "leave it out where there is none",
        )
    if gate_layout not in LAYOUTS:
        _refuse(
            f"gate_layout {shown(gate_layout)}",
            f"must be one of {', '.join(LAYOUTS)}",
            "leave it out where all rows of the gate come before those of up",
        )
    if hidden.shape[1] % _ALIGNMENT or inner % _ALIGNMENT:
        _refuse(
            f"H {hidden.shape[1]}, I {inner}",
            f"must be multiples of {_ALIGNMENT}: rows of 16-bit types begin at 16 bytes",
            "pad both weights and tokens with zeros",
        )
    if not 1 <= count <= EXPERTS:
        _refuse(
            f"{count} experts",
            f"must be 1 to {EXPERTS}",
            "call it for some of the experts at a time, with first_expert, and add the results",
        )
    plain = isinstance(gate_up, torch.Tensor) and first.dtype != _FP8
    if plain and (first.dtype not in _TYPES or first.dtype != second.dtype):
        _refuse(
            f"gate_up {shown(first.dtype)}, down {shown(second.dtype)}",
            "must be of one type: bfloat16, float16 or float32, or float8_e4m3fn with scales",
            "convert them",
        )
    if ids.shape != weights.shape or ids.shape[0] != hidden.shape[0]:
        _refuse(
            f"ids {_extents(ids)}, weights {_extents(weights)}, {hidden.shape[0]} tokens",
            "must both be [tokens, k]",
            "pass the indices and the values of one topk",
        )


def _check_recipe(
    recipe: object, gate_up: torch.Tensor | PackedExperts, down: torch.Tensor | PackedExperts
) -> None:
    """Raise ProblemError for a recipe that experts have not, and for what cannot train with it."""
    if recipe not in float8_experts.RECIPES:
        _refuse(
            f"recipe {shown(recipe)}",
            f"must be {' or '.join(float8_experts.RECIPES)}, or None",
            'pass recipe="blockwise", or leave it out for GEMMs of 16 bits',
        )
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not isinstance(weight, torch.Tensor) or weight.dtype not in _TYPES:
            kind = "PackedExperts" if isinstance(weight, PackedExperts) else shown(weight.dtype)
            _refuse(
                f"{name} of {kind} with recipe {shown(recipe)}",
                "must be bfloat16, float16 or float32: each call quantizes it",
                "leave the recipe out: weights in fp8 and quantized ones do not train",
            )
        elif any(extent % float8_experts.ALIGNMENT for extent in weight.shape[1:]):
            _refuse(
                f"{name} {_extents(weight)} (inputs first) with recipe {shown(recipe)}",
                f"must have sizes that are multiples of {float8_experts.ALIGNMENT}: rows in fp8 "
                "begin at 16 bytes",
                "pad both weights and tokens with zeros",
            )


def _check_returned(name: str, found: object, shape: Sequence[int]) -> None:
    """Raise ProblemError for what a function of the caller's returned in place of rows."""
    if not isinstance(found, torch.Tensor) or found.shape != (*shape,):
        _refuse(
            f"{name} that returned {shown(found)}",
            f"must be a function that returns a tensor {[*shape]}: a row for each that it is given",
            "return what it computes of the rows",
        )


def _check_quantized(hidden: torch.Tensor, gate_up: object, down: object) -> None:
    """Raise ProblemError for quantized weights beside other ones, or tokens of other types."""
    if not (isinstance(gate_up, PackedExperts) and isinstance(down, PackedExperts)):
        _refuse(
            f"gate_up of {type(gate_up).__name__}, down of {type(down).__name__}",
            "must both be PackedExperts, or both tensors",
            "quantize both with warploom.PackedExperts.quantize",
        )
    for name, weight in (("gate_up", gate_up), ("down", down)):
        parts = weight.tensors() if isinstance(weight, PackedExperts) else {}
        for part, tensor in parts.items():
            _check_frozen(f"{part} of {name}", tensor)
    if hidden.dtype not in PRODUCTS:
        _refuse(
            f"tokens of {shown(hidden.dtype)} with quantized weights",
            "must be bfloat16 or float16",
            "convert them, or call it under torch.autocast",
        )


def _check_scales(
    hidden: torch.Tensor,
    matrices: dict[str, torch.Tensor | PackedExperts],
    scales: dict[str, torch.Tensor | None],
    transposed: bool,
) -> None:
    """Raise ProblemError for block scales that are not those of e4m3 matrices [E, K, N]."""
    for (name, weight), (which, scale) in zip(matrices.items(), scales.items(), strict=True):
        if not isinstance(weight, torch.Tensor) or weight.dtype != _FP8:
            if any(one is not None for one in scales.values()):
                kind = shown(weight.dtype) if isinstance(weight, torch.Tensor) else "PackedExperts"
                fix = "leave the scales out, or quantize both weights"
                _refuse(f"{name} of {kind} with scales", "must be float8_e4m3fn", fix)
            continue
        count, k, n = weight.shape
        shape = (count, blocks_of(n), blocks_of(k))
        if scale is None or scale.shape != shape or scale.dtype not in BLOCK_SCALES:
            given = None if scale is None else f"{_extents(scale)} of {shown(scale.dtype)}"
            _refuse(
                f"{which} {given} of {name} in float8_e4m3fn",
                f"must be float32 or float8_e8m0fnu {[*shape]}: one for each 128x128 of a weight",
                "quantize the weights by blocks of 128x128",
            )
        if transposed or n % 16 or k % 16:
            _refuse(
                f"{name} [{count}, {n}, {k}] in float8_e4m3fn, transposed {transposed}",
                "must have its inputs last, and sizes that are multiples of 16",
                "lay it out so, padded with zeros",
            )
        if hidden.dtype not in PRODUCTS:
            _refuse(
                f"tokens of {shown(hidden.dtype)} with {name} in float8_e4m3fn",
                "must be bfloat16 or float16",
                "convert them, or call it under torch.autocast",
            )
        _check_frozen(f"{name} in float8_e4m3fn", weight)
        _check_frozen(which, scale)


def _check_frozen(what: str, tensor: torch.Tensor | None) -> None:
    """Raise ProblemError for a part of a quantized weight that is to be trained."""
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        _refuse(
            f"{what} that requires grad",
            "must not require grad: a quantized weight is fixed, and has no gradient",
            "use requires_grad_(False), or train weights of 16 bits, in fp8 by recipe='blockwise'",
        )


def _extents(tensor: torch.Tensor) -> list[Any]:
    return list(tensor.shape)


def _refuse(value: str, rule: str, fix: str) -> None:
    raise ProblemError(value, rule=rule, fix=fix)
