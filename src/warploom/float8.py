"""fp8 training by the names of torchao.float8: `from warploom.float8 import ...`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.integrations.float8_sharding import gathered_in_fp8
from warploom.integrations.linear import Linear
from warploom.integrations.recipes import RECIPES, Recipe, require_recipe
from warploom.runtime.tensors import shown

__all__ = ["RECIPES", "Float8LinearConfig", "Recipe", "convert_to_float8_training"]


@dataclass(frozen=True)
class Float8LinearConfig:
    """What layers in fp8 quantise: a recipe by name.

    Args:
        recipe_name: tensorwise, rowwise or rowwise_with_gw_hp, with torchao's numerics; or
            blockwise or delayed, with Transformer Engine's; or fp4_qat, which emulates fp4 (see
            `warploom.nn.Linear`).
        enable_fsdp_float8_all_gather: With tensorwise: `fully_shard` gathers weights in e4m3, half
            of the bytes of bf16. Weights become other parameters: make optimizers of them after the
            conversion. Layers that share a weight still do; one that an embedding has too is
            gathered in 16 bits. Not with torch.compile.

    Raises:
        ProblemError: for another name, and for another recipe with fp8 gathers.
    """

    recipe_name: Recipe = "tensorwise"
    enable_fsdp_float8_all_gather: bool = False

    def __post_init__(self) -> None:
        require_recipe("recipe_name", self.recipe_name)
        require_boolean("enable_fsdp_float8_all_gather", self.enable_fsdp_float8_all_gather)
        if self.enable_fsdp_float8_all_gather and self.recipe_name != "tensorwise":
            raise ProblemError(
                f"enable_fsdp_float8_all_gather with recipe_name {shown(self.recipe_name)}",
                rule='must be with "tensorwise": processes agree on one scale for a weight',
                fix="leave it out, and weights are gathered in their own dtype or in 16 bits",
            )

    @classmethod
    def from_recipe_name(cls, recipe_name: Recipe) -> Self:
        """Return the configuration of a recipe, as torchao's has it."""
        return cls(recipe_name)


def convert_to_float8_training(
    module: torch.nn.Module,
    *,
    module_filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> torch.nn.Module:
    """Let the linear layers of a model train in fp8, in place, and return the model.

    Args:
        module: A model; of a torch.nn.Linear itself, the layer in its place is returned.
        module_filter_fn: Called with each torch.nn.Linear and its name: whether it is converted.
            None: all are.
        config: What is quantised, and how.

    Parameters are shared with the layers before. `warploom.patch(model, recipe=...)` does the same
    and can be undone.

    Raises:
        ProblemError: for what is no torch.nn.Module, and for layers that cannot be converted; then
            nothing is.

    Example:
        >>> convert_to_float8_training(
        ...     model,
        ...     config=Float8LinearConfig.from_recipe_name("rowwise"),
        ...     module_filter_fn=lambda layer, name: name != "lm_head",
        ... )
    """
    if not isinstance(module, torch.nn.Module):
        raise ProblemError(
            f"module {shown(module)}", rule="must be a torch.nn.Module", fix="pass the model"
        )
    config = Float8LinearConfig() if config is None else config
    if not isinstance(config, Float8LinearConfig):
        raise ProblemError(
            f"config {shown(config)}",
            rule="must be a warploom.float8.Float8LinearConfig",
            fix='pass Float8LinearConfig.from_recipe_name("rowwise")',
        )
    layers = {
        layer: Linear.from_torch(layer, recipe=config.recipe_name)
        for name, layer in module.named_modules()
        if type(layer) is torch.nn.Linear
        and (module_filter_fn is None or module_filter_fn(layer, name))
    }
    if config.enable_fsdp_float8_all_gather:
        _gather_in_fp8(module, layers)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if type(child) is torch.nn.Linear and child in layers:
                parent._modules[name] = layers[child]
    return layers.get(module, module) if type(module) is torch.nn.Linear else module


def _gather_in_fp8(module: torch.nn.Module, layers: dict[torch.nn.Linear, Linear]) -> None:
    """Give layers, by those that they replace, weights that are gathered in fp8.

    Layers that share a weight share it again. One that other modules hold too, such as an
    embedding, stays as it is.
    """
    elsewhere = {
        id(one)
        for holder in module.modules()
        if holder not in layers
        for one in holder.parameters(recurse=False)
    }
    made = dict[int, torch.nn.Parameter]()
    for layer in layers.values():
        weight = layer.get_parameter("weight")
        if id(weight) in elsewhere:
            continue
        if id(weight) not in made:
            made[id(weight)] = gathered_in_fp8(weight)
        layer.weight = made[id(weight)]
