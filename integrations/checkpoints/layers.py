"""The layers of a checkpoint: which tensors each has, and its weight as kernels read it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from warploom.integrations.checkpoints.shards import Shards
from warploom.integrations.quantized_rules import INPUTS
from warploom.quantization import PackedWeight
from warploom.quantization.importers import import_gate_up, import_weight

# Scales of activations and caches in 8 bits, which stay in 16 here.
IGNORED = re.compile(
    r"\.(input_scale|output_scale|activation_scale|input_global_scale|input_zero_point"
    r"|[kqv]_scale|[kv]_zero_point|inv_freq)$"
)
Contents = tuple[dict[str, torch.Tensor], torch.Tensor | None]


class Layers:
    """The layers of a checkpoint, by their names in the model."""

    def __init__(
        self, shards: Shards, settings: Mapping[str, Any], requantize: str | None = None
    ) -> None:
        """List the tensors of each layer.

        Args:
            shards: The checkpoint.
            settings: Its quantization_config.
            requantize: As `import_weight` takes it.
        """
        self._shards = shards
        self._settings = settings
        self._requantize = requantize
        self.keys: dict[str, list[str]] = {}
        for key in shards:
            self.keys.setdefault(key.rpartition(".")[0], []).append(key)

    def is_quantized(self, layer: str) -> bool:
        """Whether a layer's tensors are more than a weight and a bias of 16 or 32 bits."""
        keys = [key for key in self.keys.get(layer, []) if not IGNORED.search(key)]
        names = {key.rpartition(".")[2] for key in keys}
        if names <= {"weight", "bias"}:
            return "weight" in names and self._shards.is_quantized(f"{layer}.weight")
        return bool(names)

    def read(self, layer: str, device: torch.device) -> Contents:
        """The tensors of a layer's weight, by their names in the layer, and its bias."""
        tensors = {
            key.rpartition(".")[2]: self._shards[key].to(device)
            for key in self.keys.get(layer, [])
            if not IGNORED.search(key)
        }
        return tensors, tensors.pop("bias", None)

    def weight(
        self, tensors: Mapping[str, torch.Tensor], layer: str, expert: int | None = None
    ) -> PackedWeight:
        """The quantized weight of these tensors of a layer."""
        return import_weight(
            tensors,
            self._settings,
            name=self._stored(layer),
            expert=expert,
            requantize=self._requantize,
            activations=INPUTS,
        )

    def gate_up(
        self,
        gate: Mapping[str, torch.Tensor],
        up: Mapping[str, torch.Tensor],
        names: Sequence[str],
    ) -> PackedWeight | None:
        """The quantized weight of gate and up of an expert, whose rows take turns."""
        stored = [self._stored(one) for one in names[:2]]
        return import_gate_up((gate, up), self._settings, stored, self._requantize)

    def _stored(self, layer: str) -> str:
        """What the files, and so the patterns of the configuration, call a layer."""
        keys = self.keys.get(layer)
        return self._shards.stored(keys[0]).rpartition(".")[0] if keys else layer
