"""Experts that a checkpoint has one by one, and a model of transformers as one tensor of all.

They stay quantized, as `QuantizedExperts`, where kernels have the gate. Else they are dequantized
to the dtype of the model, whose own layer takes tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from warploom.errors import ProblemError
from warploom.integrations.checkpoints.experts import PARTS, QuantizedExperts
from warploom.integrations.checkpoints.layers import Contents, Layers
from warploom.integrations.quantized_linear import QuantizedLinear
from warploom.quantization import PackedWeight

# What checkpoints call gate, up and down of an expert: Qwen's and DeepSeek's, and Mixtral's.
NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")

# Where a tensor in the place of this one is to be, and of what dtype.
Place = Callable[[torch.Tensor], tuple[torch.device, torch.dtype]]
Names = Sequence[tuple[str, str, str]]  # of gate, up and down of each expert


def is_joined(module: Any) -> bool:  # noqa: ANN401 (experts of transformers)
    """Whether a module has the weights of all experts in two tensors of three dimensions."""
    parts = [getattr(module, "_parameters", {}).get(name) for name in PARTS]
    return all(one is not None and one.dim() == 3 for one in parts)


def read(
    name: str,
    module: Any,  # noqa: ANN401
    given: Sequence[str],
    layers: Layers,
    place: Place,
) -> QuantizedExperts | dict[str, torch.Tensor]:
    """Return quantized experts, or dequantized weights of all by the model's names.

    Args:
        name: The module's name.
        module: Experts of transformers, with `gate_up_proj` and `down_proj` of all.
        given: The layers of these experts in the checkpoint, such as `{name}.3.w1`.
        layers: Reads them.
        place: Says where tensors are to be.

    Raises:
        ProblemError: The checkpoint has other experts or other layers than the model, or a bias
            where the model has none; or experts to dequantize have biases, or inputs first.
    """
    from warploom.integrations.transformers_experts import gate_with_kernel  # and transformers

    names = _names(name, module, given)
    if all(map(layers.is_quantized, chain(*names))):
        gate = gate_with_kernel(module)
        made = None if gate is None else _quantized(name, module, names, layers, place)
        if gate is not None and made is not None:
            return QuantizedExperts.in_place_of(module, *made, gate=gate)
    return _dequantized(name, module, names, layers, place)


def one_of(
    module: Any,  # noqa: ANN401
    part: str,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> QuantizedLinear:
    """The layer of one expert in the place of its part of a tensor of all."""
    own = None if bias is None else bias.to(dtype, copy=True)
    made = QuantizedLinear.from_packed(weight, own)
    made.dtype = dtype
    if made.bias is not None:
        made.bias.requires_grad_(getattr(module, f"{part}_bias").requires_grad)
    return made


def unlike(name: str, found: Any, wanted: Any) -> ProblemError:  # noqa: ANN401
    """The error of a tensor that has another shape than the model's."""
    return ProblemError(
        f"{name} is {list(found)} in the checkpoint",
        rule=f"must be {list(wanted)}, as the model's",
        fix="make the model of the checkpoint's config.json",
    )


def _names(name: str, module: Any, given: Sequence[str]) -> Names:  # noqa: ANN401
    found = [match for match in map(EXPERT.fullmatch, given) if match]
    parts, numbers = {match[3] for match in found}, {int(match[2]) for match in found}
    known = next((one for one in NAMES if {*one} == parts), None)
    if known is None:
        raise ProblemError(
            f"{name}: quantized experts with {', '.join(sorted(parts))}, in a "
            f"{type(module).__name__}",
            rule="must be experts of gate, up and down each",
            fix="mixtures of experts of this kind are not read yet",
        )
    count = len(module.down_proj)
    if numbers != {*range(count)}:
        raise ProblemError(
            f"{name}: {len(numbers)} experts up to {max(numbers)} in the checkpoint",
            rule=f"must be the model's {count} experts",
            fix="download the checkpoint again, or make the model of its config.json",
        )
    gate, up, down = ([f"{name}.{one}.{part}" for one in range(count)] for part in known)
    return list(zip(gate, up, down, strict=True))


def _quantized(
    name: str,
    module: Any,  # noqa: ANN401
    names: Names,
    layers: Layers,
    place: Place,
) -> list[list[QuantizedLinear]] | None:
    """Layers of all experts, by `PARTS`; None where gate and up are quantized differently."""
    from warploom.integrations.expert_layers import shape_of

    device, dtype = place(module.down_proj)
    joined = _joined_scales(name, layers, device)
    made: list[list[QuantizedLinear]] = [[], []]
    for expert, (gate, up, down) in enumerate(names):
        contents = _contents(expert, (gate, up, down), joined, layers, device)
        first, second, third = (tensors for tensors, _ in contents)
        both = layers.gate_up(first, second, (gate, up))
        if both is None:
            return None
        one, other, last = (
            _bias(module, layer, bias)
            for layer, (_, bias) in zip((gate, up, down), contents, strict=True)
        )
        turns = None if one is None or other is None else torch.stack((one, other), 1).flatten()
        parts = ((gate, both, turns), (down, layers.weight(third, down), last))
        for part, found, (layer, weight, bias) in zip(PARTS, made, parts, strict=True):
            if weight.shape != (shape := shape_of(module, part)):
                raise unlike(layer, weight.shape, shape)
            found.append(one_of(module, part, weight, bias, dtype))
    return made


def _joined_scales(name: str, layers: Layers, device: torch.device) -> list[torch.Tensor | None]:
    """The scales of all experts at once, by `PARTS`, which are read once for all.

    transformers splits the weights of experts in fp8 as it saves them, but not their scales.
    """
    tensors, _ = layers.read(name, device)
    return [tensors.get(f"{part}_scale_inv") for part in PARTS]


def _contents(
    expert: int,
    own: tuple[str, str, str],
    joined: Sequence[torch.Tensor | None],
    layers: Layers,
    device: torch.device,
) -> list[Contents]:
    """The tensors of gate, up and down of an expert, and their biases."""
    found = [layers.read(one, device) for one in own]
    if joined[0] is not None and joined[1] is not None:
        scales = (*joined[0][expert].chunk(2), joined[1][expert])
        for (tensors, _), scale in zip(found, scales, strict=True):
            tensors["weight_scale_inv"] = scale
    return found


def _bias(module: Any, layer: str, bias: torch.Tensor | None) -> torch.Tensor | None:  # noqa: ANN401
    """The bias of an expert's layer; None where its model has none, and it is 0 or missing."""
    if getattr(module, "has_bias", False):
        if bias is None:
            raise _absent(f"{layer}.bias")
        return bias
    if bias is not None and bool(bias.any()):  # AutoGPTQ writes biases of 0
        raise ProblemError(
            f"{layer}.bias", rule="must be 0", fix="the model's experts have no biases"
        )
    return None


def _absent(key: str) -> ProblemError:
    return ProblemError(
        f"{key} is not in the checkpoint",
        rule="must be: the model's experts have it",
        fix="download the checkpoint again, or make the model of its config.json",
    )


def _dequantized(
    name: str,
    module: Any,  # noqa: ANN401
    names: Names,
    layers: Layers,
    place: Place,
) -> dict[str, torch.Tensor]:
    """The weights of all experts, gate and up after one another, by the model's names."""
    if getattr(module, "has_bias", False) or getattr(module, "is_transposed", False):
        raise ProblemError(
            f"{name}: experts with biases or with inputs first, of which not all are quantized "
            "alike",
            rule="must have neither to be dequantized",
            fix="quantize gate, up and down of all experts in the same way",
        )
    made = {}
    for part in PARTS:
        tensor = module.get_parameter(part)
        device, dtype = place(tensor)
        made[part] = torch.empty(tensor.shape, dtype=dtype, device=device)
    first, second = made.values()
    joined = _joined_scales(name, layers, second.device)
    for expert, (gate, up, down) in enumerate(names):
        targets = (*first[expert].chunk(2), second[expert])
        contents = _contents(expert, (gate, up, down), joined, layers, second.device)
        for layer, target, (tensors, bias) in zip((gate, up, down), targets, contents, strict=True):
            _bias(module, layer, bias)
            weight = (
                layers.weight(tensors, layer).dequantize(target.dtype)
                if layers.is_quantized(layer)
                else tensors.get("weight")
            )
            if weight is None:
                raise _absent(f"{layer}.weight")
            if weight.shape != target.shape:
                raise unlike(layer, weight.shape, target.shape)
            target.copy_(weight)
    return {f"{name}.{part}": tensor for part, tensor in made.items()}
