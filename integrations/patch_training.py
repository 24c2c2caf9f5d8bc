"""Which layers of a model train while others are frozen: `warploom.patch` quantises none of them.

A quantised weight is frozen. Where torch loads a model, every weight requires a gradient, and that
says nothing; where some weights are frozen, the others were left to train.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

TRAINS = "it trains: its weight requires a gradient, and other weights are frozen"
EXPERTS = ("gate_up_proj", "up_proj", "down_proj")  # parameters of layers of experts
ADAPTER = "peft trains it or a copy of it"
# Where peft's modules keep the model's own.
_WRAPPED = ("base_layer", "base_model", "lora_model", "model")


def trained(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """The linear layers and experts that keep their weights because they train, and why.

    These are whatever peft adds to a model, whether it trains now or was loaded for inference, and
    its copies in `modules_to_save`; and each whose weight requires a gradient in a model that
    multiplies by another weight which is frozen.
    """
    mixed = any(_requires_grad(module) is False for module in model.modules())
    found: dict[torch.nn.Module, str] = {
        module: TRAINS
        for module in model.modules()
        if mixed and _requires_grad(module) and _quantizes(module)
    }
    return {**found, **dict.fromkeys(_adapters(model), ADAPTER)}


def _requires_grad(module: torch.nn.Module) -> bool | None:
    """Whether a matrix that a module multiplies by trains; None for a module without one.

    The table of an embedding is none: those of positions are often constants of a model.
    """
    own = (module._parameters.get(name) for name in ("weight", *EXPERTS))
    weights = [one for one in own if one is not None and one.dim() > 1]
    if not weights or isinstance(module, torch.nn.Embedding):
        return None
    return any(one.requires_grad for one in weights)


def _quantizes(module: torch.nn.Module) -> bool:
    """Whether a module's matrices are what a patch quantizes."""
    return isinstance(module, torch.nn.Linear) or not module._parameters.keys().isdisjoint(EXPERTS)


def _adapters(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """All modules in what peft added to a model."""
    for module in model.modules():
        if any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__):
            for name, child in module.named_children():
                if name not in _WRAPPED:
                    yield from child.modules()
