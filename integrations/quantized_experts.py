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
    if reason := _without_kernel(layer):
        return reason
    try:
        for part in PARTS:
            asked.metadata(shape_of(layer, part))
    except ProblemError as error:
        return f"{error.value} {error.rule}"
    return ""


def gate_with_kernel(module: Any) -> str | None:  # noqa: ANN401 (of transformers)
    """The gate of a layer of experts, if it is one whose quantized weights kernels read."""
    from warploom.integrations import transformers_experts as rules  # imports transformers

    if module not in layers_of(module) or _without_kernel(module):
        return None
    return str(rules.gate_of(module)[0])


def _without_kernel(layer: Any) -> str:  # noqa: ANN401 (of transformers)
    """Why no kernel reads quantized weights of a layer of experts; "" where one does."""
    from warploom.integrations import transformers_experts as rules  # imports transformers

    if "forward" in vars(layer):
        return "its forward was replaced on the instance"
    if not layer.has_gate:
        return "experts without a gate have no kernel of quantized weights"
    if (reason := rules.unfit(layer)) is not None:
        return reason
    if callable(rules.gate_of(layer)[0]):
        return "no kernel has its gate"
    return "" if rules.norm_of(layer) is None else "no kernel has its norm"


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
