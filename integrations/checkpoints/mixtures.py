"""Experts that a checkpoint has one by one, and a model of transformers as one tensor of all.

They stay quantized, as `QuantizedExperts`, where kernels have the gate. Else they are dequantized
to the dtype of the model, whose own layer takes tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
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
_FIX = "download the checkpoint again, or make the model of its config.json"


def is_joined(module: Any) -> bool:  # noqa: ANN401 (experts of transformers)
    """Whether a module has the weights of all experts in two tensors of three dimensions."""
    parts = [getattr(module, "_parameters", {}).get(name) for name in PARTS]
    return all(one is not None and one.dim() == 3 for one in parts)


def one_of(
    module: Any,  # noqa: ANN401
    part: str,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> QuantizedLinear:
    """The layer of one expert, instead of its part of a tensor of all."""
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


class Mixture:
    """The experts of a layer: gate, up and down of each, as the checkpoint has them."""

    def __init__(
        self,
        name: str,
        module: Any,  # noqa: ANN401
        given: Sequence[str],
        layers: Layers,
        place: Callable[[torch.Tensor], tuple[torch.device, torch.dtype]],
    ) -> None:
        """Find the layers of each expert.

        Args:
            name: The module's name.
            module: Experts of transformers, with `gate_up_proj` and `down_proj` of all.
            given: The layers of these experts in the checkpoint, such as `{name}.3.w1`.
            layers: Reads them.
            place: Says on which device and of what dtype a tensor is to be.

        Raises:
            ProblemError: The checkpoint has other experts or other layers than the model.
        """
        self._name, self._module, self._layers, self._place = name, module, layers, place
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
                fix=_FIX,
            )
        self._names = [[f"{name}.{one}.{part}" for part in known] for one in range(count)]
        self._has_bias = getattr(module, "has_bias", False)

    def read(self) -> QuantizedExperts | dict[str, torch.Tensor]:
        """Return quantized experts, or dequantized weights of all by the model's names.

        Raises:
            ProblemError: A bias that the model has not, or one that is missing; or experts to
                dequantize that have biases, or inputs first.
        """
        from warploom.integrations.transformers_experts import gate_with_kernel  # and transformers

        quantized = all(map(self._layers.is_quantized, chain(*self._names)))
        gate = gate_with_kernel(self._module) if quantized else None
        made = None if gate is None else self._quantized()
        if gate is None or made is None:
            return self._dequantized()
        return QuantizedExperts.in_place_of(self._module, *made, gate=gate)

    def _quantized(self) -> list[list[QuantizedLinear]] | None:
        """Layers of all experts, by `PARTS`; None where gate and up are quantized differently."""
        from warploom.integrations.expert_layers import shape_of

        device, dtype = self._place(self._module.down_proj)
        made: list[list[QuantizedLinear]] = [[], []]
        for expert, names in enumerate(self._names):
            (gate, one), (up, other), (down, last) = self._contents(expert, device)
            both = self._layers.gate_up(gate, up, names)
            if both is None:
                return None
            turns = None if one is None or other is None else torch.stack((one, other), 1).flatten()
            parts = ((both, turns), (self._layers.weight(down, names[2]), last))
            for part, layers, (weight, bias) in zip(PARTS, made, parts, strict=True):
                if weight.shape != (shape := shape_of(self._module, part)):
                    raise unlike(f"{self._name}.{expert}: {part}", weight.shape, shape)
                layers.append(one_of(self._module, part, weight, bias, dtype))
        return made

    @cached_property
    def _joined_scales(self) -> list[torch.Tensor | None]:
        """The scales of all experts in one tensor, by `PARTS`, which are read once for all.

        transformers splits the weights of experts in fp8 as it saves them, but not their scales.
        """
        device, _ = self._place(self._module.down_proj)
        tensors, _ = self._layers.read(self._name, device)
        return [tensors.get(f"{one}_scale_inv") for one in PARTS]

    def _contents(self, expert: int, device: torch.device) -> list[Contents]:
        """The tensors of gate, up and down of an expert, and their biases."""
        found = [self._layers.read(one, device) for one in self._names[expert]]
        first, second = self._joined_scales
        if first is not None and second is not None:
            scales = (*first[expert].chunk(2), second[expert])
            for (tensors, _), scale in zip(found, scales, strict=True):
                tensors["weight_scale_inv"] = scale
        biases = [
            self._bias(layer, bias)
            for layer, (_, bias) in zip(self._names[expert], found, strict=True)
        ]
        return [(tensors, bias) for (tensors, _), bias in zip(found, biases, strict=True)]

    def _bias(self, layer: str, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The bias of an expert's layer; None where its model has none, and it is 0 or missing."""
        if self._has_bias and bias is None:
            raise _absent(f"{layer}.bias")
        if not self._has_bias and bias is not None and bool(bias.any()):
            raise ProblemError(
                f"{layer}.bias", rule="must be 0", fix="the model's experts have no biases"
            )
        return bias if self._has_bias else None  # AutoGPTQ writes biases of 0

    def _dequantized(self) -> dict[str, torch.Tensor]:
        """The weights of all experts, gate and up after one another, by the model's names."""
        if self._has_bias or getattr(self._module, "is_transposed", False):
            raise ProblemError(
                f"{self._name}: experts with biases or inputs first, not all quantized alike",
                rule="must have neither to be dequantized",
                fix="quantize gate, up and down of all experts in the same way",
            )
        made = {}
        for part in PARTS:
            tensor = self._module.get_parameter(part)
            device, dtype = self._place(tensor)
            made[part] = torch.empty(tensor.shape, dtype=dtype, device=device)
        first, second = made.values()
        for expert, names in enumerate(self._names):
            targets = (*first[expert].chunk(2), second[expert])
            contents = self._contents(expert, second.device)
            for layer, target, (tensors, _) in zip(names, targets, contents, strict=True):
                if self._layers.is_quantized(layer):
                    weight = self._layers.weight(tensors, layer).dequantize(target.dtype)
                elif "weight" in tensors:
                    weight = tensors["weight"]
                else:
                    raise _absent(f"{layer}.weight")
                if weight.shape != target.shape:
                    raise unlike(layer, weight.shape, target.shape)
                target.copy_(weight)
        return {f"{self._name}.{part}": tensor for part, tensor in made.items()}


def _absent(key: str) -> ProblemError:
    return ProblemError(
        f"{key} is not in the checkpoint", rule="must be: the model's experts have it", fix=_FIX
    )
