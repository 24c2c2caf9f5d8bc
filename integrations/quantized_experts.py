"""Experts of transformers' models that get quantized weights: which, and how these are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from warploom.errors import ProblemError
from warploom.integrations import patch_weights
from warploom.integrations.checkpoints.experts import PARTS, QuantizedExperts
from warploom.integrations.expert_layers import layers_of, shape_of
from warploom.integrations.patch_report import AS_IT_WAS, Row
from warploom.integrations.patch_weights import Asked, Chosen
from warploom.integrations.quantized_linear import QuantizedLinear


def choose(model: torch.nn.Module, asked: Asked) -> tuple[Chosen, dict[torch.nn.Module, str]]:
    """The layers of experts whose weights are to be quantized, and why those of others not."""
    return patch_weights.choose(model, asked, set(layers_of(model)).__contains__, unable)


def unable(layer: Any, asked: Asked) -> str:  # noqa: ANN401 (of transformers)
    """Why the weights of a layer of experts cannot be quantized as asked; "" where they can."""
    from warploom.integrations import transformers_experts as rules  # imports transformers

    if reason := rules.without_kernel(layer):
        return reason
    try:
        for part in PARTS:
            asked.metadata(shape_of(layer, part))
    except ProblemError as error:
        return f"{error.value} {error.rule}"
    return ""


def quantized(layer: Any, asked: Asked) -> QuantizedExperts:  # noqa: ANN401 (of transformers)
    """Experts with the weights of a layer, quantized; rows of gate and up alternate in them."""
    from warploom.integrations import transformers_experts as rules  # imports transformers

    gate, layout = rules.gate_of(layer)
    parts = []
    for part in PARTS:
        made = []
        halves = part == PARTS[0] and layout == "halves"
        for expert, own in enumerate(getattr(layer, part).detach()):
            weight = own.mT if layer.is_transposed else own
            bias = getattr(layer, f"{part}_bias")[expert].detach() if layer.has_bias else None
            if halves:
                weight, bias = _interleaved(weight), None if bias is None else _interleaved(bias)
            packed = asked.quantize(weight.contiguous())
            if bias is not None:
                trains = getattr(layer, f"{part}_bias").requires_grad
                bias = torch.nn.Parameter(bias.clone(), requires_grad=trains)
            one = QuantizedLinear.from_packed(packed, bias)
            one.dtype = own.dtype
            made.append(one)
        parts.append(made)
    return QuantizedExperts.in_place_of(layer, *parts, gate=str(gate))


def rows(
    chosen: Chosen,
    left: Mapping[Any, str],
    asked: Asked,
) -> Iterator[Row]:
    """What becomes of layers of experts whose weights were to be quantized."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for layer in chosen:
        counted[f"experts of {type(layer).__name__}", asked.described("quantized experts"), ""] += 1
    for layer, reason in left.items():
        what = f"weights of {type(layer).__name__}"
        counted[what, AS_IT_WAS, reason] += 1
    for (what, now, reason), count in counted.most_common():
        yield Row(what, count, now, reason)


def _interleaved(halves: torch.Tensor) -> torch.Tensor:
    """Rows of the first half and of the second in turn."""
    return torch.stack(halves.chunk(2), 1).flatten(0, 1)
