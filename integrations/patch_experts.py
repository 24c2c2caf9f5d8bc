"""The experts of transformers' models in a module: set to Warploom's, and back again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator
from typing import Any

import torch

from warploom.integrations.expert_layers import NAME, RECIPE, layers_of
from warploom.integrations.linear_rules import PRODUCTS
from warploom.integrations.patch_attention import configs, outermost
from warploom.integrations.patch_report import AS_IT_WAS, Row
from warploom.integrations.recipes import Recipe
from warploom.quantization.checks import require_fp8_scales


class PatchedExperts:
    """The models of transformers in a module, and what ran their experts before."""

    def __init__(
        self,
        module: torch.nn.Module,
        quantized: Container[Any] = (),
        training: Collection[Any] = (),
        recipe: Recipe | None = None,
    ) -> None:
        """`quantized` layers are replaced, and told of elsewhere; those in `training` are to train
        in fp8 by the recipe.
        """
        self._quantized, self._training, self._recipe = quantized, training, recipe
        _check_scales(module)
        self._models = [one for one in outermost(module) if any(layers_of(one))]
        self._implementations = [
            (config, config._experts_implementation)
            for model in self._models
            for config in configs(model)
        ]

    def apply(self) -> list[Row]:
        """Set the experts of each model, and report them; where one raises, `undo` is for all."""
        if not self._models:
            return []
        from warploom.integrations import transformers_experts  # imports transformers

        transformers_experts.register()
        before = {id(config): name for config, name in self._implementations}
        rows = list[Row]()
        for model in self._models:
            model.set_experts_implementation(NAME)
            asked = {}
            for layer in layers_of(model):
                if self._recipe is not None and layer in self._training:
                    asked[layer] = self._train(transformers_experts, layer, self._recipe)
            rows += _rows(model, before, self._quantized, asked)
        return rows

    def _train(self, rules: Any, layer: Any, recipe: Recipe) -> str:  # noqa: ANN401
        """Let a layer train by a recipe; or say why it does not."""
        if _is_fp8(layer) or rules.unfit(layer):
            return ""  # which is told whatever the recipe
        refusal: str | None = rules.untrained(layer, recipe)
        if refusal is None:
            setattr(layer, RECIPE, recipe)
        return refusal or ""

    def undo(self) -> None:
        """Give the models what ran their experts, whatever part of `apply` was done."""
        for layer in self._training:
            vars(layer).pop(RECIPE, None)
        for config, implementation in self._implementations:
            config._experts_implementation_internal = implementation


def _is_fp8(layer: torch.nn.Module) -> bool:
    return any(parameter.dtype.itemsize == 1 for parameter in layer.parameters(recurse=False))


def _check_scales(model: torch.nn.Module) -> None:
    """Raise ProblemError for a scale of fp8 experts that no product can be right with."""
    for name, layer in model.named_modules():
        if hasattr(layer, "is_concatenated") and _is_fp8(layer):
            for own, tensor in layer.named_parameters(recurse=False):
                if own.endswith("_scale_inv"):
                    require_fp8_scales(f"{name}: {own}", tensor)


def _rows(
    model: Any,  # noqa: ANN401
    before: dict[int, str | None],
    quantized: Container[Any],
    asked: dict[Any, str],
) -> Iterator[Row]:
    """What the layers of experts of a model are now; `asked` were to train in fp8, or why not."""
    from warploom.integrations import fp8_experts  # imports transformers
    from warploom.integrations import transformers_experts as rules

    counted: Counter[tuple[str, str, str]] = Counter()
    for layer in layers_of(model):
        if layer in quantized:
            continue
        config, what = layer.config, f"experts of {type(layer).__name__}"
        was, now = before.get(id(config)), config._experts_implementation
        if now != NAME:
            counted[what, AS_IT_WAS, "its model does not use transformers' ExpertsInterface"] += 1
            continue
        if _is_fp8(layer):
            reason = fp8_experts.unfit(layer) or ""
            counted[what, AS_IT_WAS if reason or was == NAME else f"{was} -> {NAME}", reason] += 1
            continue
        reason = rules.unfit(layer) or _by_torch(rules, layer)
        reason = "; ".join(filter(None, (asked.get(layer, ""), reason)))
        becomes = "" if was == NAME else f"{was} -> {NAME}"
        if (recipe := getattr(layer, RECIPE, None)) is not None:
            becomes = f"{becomes or NAME}, fp8 {recipe}"
        counted[what, becomes or AS_IT_WAS, reason] += 1
    for (what, now, reason), count in counted.most_common():
        yield Row(what, count, now, reason)


def _by_torch(rules: Any, layer: Any) -> str:  # noqa: ANN401
    """What torch computes of a layer that runs on Warploom; or ""."""
    kind = layer.down_proj.dtype
    if kind not in PRODUCTS and not hasattr(layer, RECIPE):
        name = str(kind).removeprefix("torch.")
        return f"{name} products are torch's; bfloat16 and float16, and autocast, run on Warploom"
    reasons = list[str]()
    gate, _ = rules.gate_of(layer)
    if callable(gate):
        reasons.append(f"torch computes {'its gate' if layer.has_gate else 'its activation'}")
    if rules.norm_of(layer) is not None:
        reasons.append("torch computes its norm")
    return "; ".join(reasons)
