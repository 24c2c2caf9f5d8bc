"""The experts of transformers' models in a module: set to Warploom's, and back again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from typing import Any

import torch

from warploom.integrations.expert_layers import NAME, layers_of
from warploom.integrations.linear_rules import PRODUCTS
from warploom.integrations.patch_attention import configs, outermost
from warploom.integrations.patch_report import AS_IT_WAS, Row
from warploom.quantization.checks import require_fp8_scales


class PatchedExperts:
    """The models of transformers in a module, and what ran their experts before."""

    def __init__(self, module: torch.nn.Module, quantized: Container[Any] = ()) -> None:
        """`quantized` layers are replaced, and told of elsewhere."""
        self._quantized = quantized
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
            rows += _rows(model, before, self._quantized)
        return rows

    def undo(self) -> None:
        """Give the models what ran their experts, whatever part of `apply` was done."""
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
) -> Iterator[Row]:
    """What the layers of experts of a model are now."""
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
        counted[what, AS_IT_WAS if was == NAME else f"{was} -> {NAME}", reason] += 1
    for (what, now, reason), count in counted.most_common():
        yield Row(what, count, now, reason)


def _by_torch(rules: Any, layer: Any) -> str:  # noqa: ANN401
    """What torch computes of a layer that runs on Warploom; or ""."""
    kind = layer.down_proj.dtype
    if kind not in PRODUCTS:
        name = str(kind).removeprefix("torch.")
        return f"{name} products are torch's; bfloat16 and float16, and autocast, run on Warploom"
    reasons = list[str]()
    gate, _ = rules.gate_of(layer)
    if callable(gate):
        reasons.append(f"torch computes {'its gate' if layer.has_gate else 'its activation'}")
    if rules.norm_of(layer) is not None:
        reasons.append("torch computes its norm")
    return "; ".join(reasons)
