"""Layers of experts of transformers: the names of their weights, and which ones kernels do not run.

Experts of 16 bits and of fp8 have these rules in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from warploom.generator.families.route.schedule import EXPERTS
from warploom.integrations.devices import unserved
from warploom.integrations.linear_rules import transformed

NAME = "warploom"
"""What models say for `experts_implementation`."""

RECIPE = "warploom_recipe"
"""The attribute of layers of experts that train in fp8, which `warploom.patch` sets."""


def layers_of(model: torch.nn.Module) -> Iterator[Any]:
    """The layers of experts that look up what runs them, as their class was decorated to."""
    for module in model.modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_concatenated"):
            yield module


def shape_of(module: Any, part: str) -> tuple[int, int]:  # noqa: ANN401
    """N and K of each expert's weight."""
    _, n, k = getattr(module, part).shape
    return (k, n) if module.is_transposed else (n, k)


def weight_names(module: Any) -> tuple[str, str]:  # noqa: ANN401
    """The names of the weights that a layer multiplies tokens by, first and second."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def device_refusal(hidden: torch.Tensor) -> str | None:
    """Why the device of tokens has no kernels, if it has none."""
    if hidden.device.type not in ("cuda", "cpu"):
        return f"tokens are on {hidden.device}"
    return unserved(hidden.get_device()) if hidden.device.type == "cuda" else None


def transform_refusal(module: Any, hidden: torch.Tensor) -> str | None:  # noqa: ANN401
    """Why torch's transforms, or wrapped tensors, leave a layer to torch, if they do."""
    weights = (getattr(module, name) for name in weight_names(module))
    reasons = (transformed(hidden, weight, sharded=False) for weight in weights)
    return next(filter(None, reasons), None)


def count_refusal(count: int) -> str | None:
    """Why kernels do not take so many experts, if they do not."""
    return f"it has {count} experts; kernels take at most {EXPERTS}" if count > EXPERTS else None
