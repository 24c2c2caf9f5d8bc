"""Training steps of one Llama by every recipe, compiled, in turns: `llama_step --recipe ALL`.

All models share one set of weights, gradients and, with an optimizer, of its states. Decoder layers
are compiled, one graph for all of a model, and not the whole: a contender takes a quarter of the
time to compile. Embedding, head and loss are torch's in all of them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import timing
import warploom
from warploom.float8 import RECIPES, Recipe

TORCH, OURS = "torch, bf16", "warploom, bf16"
ROUNDS, LAPS = 5, 2
GRAPHS = 64  # of one forward, that of a layer, which all models have


def contenders(model: nn.Module, *, compiled: bool) -> dict[str, nn.Module]:
    """The model as it is, on Warploom's kernels, and by each recipe; their weights are shared."""
    models: dict[str, Any] = {}
    recipes: dict[str, Recipe | None] = {
        TORCH: None,
        OURS: None,
        **{name: name for name in RECIPES},
    }
    for name, recipe in recipes.items():
        models[name] = copy.deepcopy(model, {id(one): one for one in model.parameters()})
        if name != TORCH:
            warploom.patch(models[name], recipe=recipe)
        if compiled:
            for layer in models[name].model.layers:
                layer.compile(dynamic=False)
    return models


def steps(
    models: Mapping[str, nn.Module], text: torch.Tensor, *, optimizer: bool
) -> dict[str, Callable[[], torch.Tensor]]:
    """A call of each model that makes a step and returns the loss before it."""
    parameters = list(models[TORCH].parameters())
    adam = None
    if optimizer:
        adam = torch.optim.AdamW(parameters, lr=1e-6, fused=text.is_cuda)

    def step(model: nn.Module) -> torch.Tensor:
        for one in parameters:
            one.grad = None
        loss: torch.Tensor = model(input_ids=text, labels=text, use_cache=False).loss
        torch.autograd.backward(loss)
        if adam is not None:
            adam.step()
        return loss.detach()

    return {name: lambda model=model: step(model) for name, model in models.items()}  # type: ignore[misc]


def measure(
    model: nn.Module, text: torch.Tensor, *, compiled: bool, optimizer: bool, rounds: int
) -> dict[str, Any]:
    """Seconds of a step, and of its first call, which compiles; how far losses are from torch's."""
    if compiled:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    models = contenders(model, compiled=compiled)
    calls = steps(models, text, optimizer=optimizer)
    first, losses = {}, {}
    for name, call in calls.items():
        began = time.perf_counter()
        losses[name] = call().item()
        first[name] = time.perf_counter() - began
    seconds = timing.interleave(calls, text.device, rounds=rounds, laps=LAPS)
    medians = timing.medians(seconds)
    fastest = min(medians[TORCH], medians[OURS])
    return {
        "optimizer": optimizer,
        "compiled": compiled,
        "seconds": medians,
        "rounds": seconds,
        "first call": first,
        "losses": losses,
        "bf16 / recipe": {name: fastest / medians[name] for name in RECIPES},
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for a person."""
    what = "forward, backward" + (", optimizer" if result["optimizer"] else "")
    lines = [f"Llama, {result['tokens']} tokens, {result['device']}: {what}"]
    lines.append(f"{'':<22}{'ms':>9}{'bf16 / it':>11}{'loss':>9}{'first call, s':>15}")
    fastest = min(result["seconds"][TORCH], result["seconds"][OURS])
    for name, seconds in result["seconds"].items():
        first, loss = result["first call"][name], result["losses"][name]
        row = f"{name:<22}{1e3 * seconds:>9.2f}{fastest / seconds:>11.3f}{loss:>9.4f}{first:>15.1f}"
        lines.append(row)
    return "\n".join(lines)
