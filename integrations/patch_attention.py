"""The attention of transformers' models in a module: set to Warploom's, and back again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from warploom.errors import ProblemError
from warploom.integrations import unpacked
from warploom.integrations.linear_rules import PRODUCTS
from warploom.integrations.patch_report import AS_IT_WAS, Row

# What transformers knows Warploom's attention by, by what `warploom.patch` calls it.
ATTENTIONS: dict[bool | str, str] = {True: "warploom", "8bit": "warploom_8bit"}


class PatchedAttention:
    """The models of transformers in a module, and what they attended by before."""

    def __init__(self, module: torch.nn.Module, attention: bool | str = True) -> None:
        self._name = ATTENTIONS[attention]
        self._models = list(outermost(module))
        self._implementations = [
            (config, config._attn_implementation)
            for model in self._models
            for config in configs(model)
        ]

    def apply(self) -> list[Row]:
        """Set the attention of each model, and report it; where one raises, `undo` is for all."""
        if not self._models:
            why = "no model of transformers; warploom.sdpa.activate() is for torch's own attention"
            return [Row("attention", 1, AS_IT_WAS, why)]
        register_transformers()
        rows = [_set_attention(model, self._name) for model in self._models]
        for model in self._models:
            unpacked.hook(model)
        return rows

    def undo(self) -> None:
        """Give the models the attention that they had, whatever part of `apply` was done."""
        for model in self._models:
            unpacked.unhook(model)
        for config, implementation in self._implementations:
            config._attn_implementation = implementation


def register_transformers() -> None:
    """Let transformers make and load models with Warploom's attention, experts and layers.

    Afterwards, transformers knows `attn_implementation="warploom"` and "warploom_8bit" (q, k and v
    in 8 bits, as in `warploom.attention_8bit`) and `experts_implementation="warploom"`, and
    `from_pretrained` loads what `save_pretrained` wrote of quantized layers. `warploom.patch` calls
    this function.

    Raises:
        ProblemError: transformers is not installed, or is too old.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> warploom.register_transformers()
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, num_hidden_layers=1, head_dim=64)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="warploom")
    """
    if find_spec("transformers") is None:
        raise ProblemError(
            "transformers is not installed",
            rule="must be installed: its models choose their attention by attn_implementation",
            fix="pip install 'warploom[transformers]'",
        )
    from warploom.integrations import transformers_attention  # imports transformers
    from warploom.integrations.checkpoints import quantizer  # noqa: F401 (importing registers it)

    transformers_attention.register()
    if find_spec("transformers.integrations.moe") is not None:
        from warploom.integrations import transformers_experts

        transformers_experts.register()


def outermost(module: torch.nn.Module) -> Iterator[Any]:
    """The models of transformers in a module that are not part of another."""
    if _is_transformers(module):
        yield module
        return
    for child in module.children():
        yield from outermost(child)


def _is_transformers(module: torch.nn.Module) -> bool:
    """Whether a module is a model of transformers, which is not imported for that."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def configs(model: Any) -> list[Any]:  # noqa: ANN401
    """The configurations of a model of transformers and all in it, outer ones first."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:  # noqa: ANN401
        if config is not None and id(config) not in found:
            found[id(config)] = config
            for name in config.sub_configs:
                add(getattr(config, name, None))

    for module in filter(_is_transformers, model.modules()):
        add(module.config)
    return list(found.values())


def _takes_no_name(model: Any, config: Any) -> bool:  # noqa: ANN401
    """Whether what a configuration is of has an attention of its own, whatever it is set to."""
    from warploom.integrations import transformers_interface as interface  # imports transformers

    part = interface.part_of(model, config)
    models = interface.models_of(type(config)) if part is None else [type(part)]
    return bool(models) and not any(map(interface.uses_interface, models))


def _set_attention(model: Any, name: str) -> Row:  # noqa: ANN401
    """Set the attention of a model of transformers to this one, and say what it is now."""
    before = model.config._attn_implementation
    what = f"attention of {type(model).__name__}"
    implementations = [(config, config._attn_implementation) for config in configs(model)]
    # The model itself leaves out parts whose configurations are copies.
    for module in filter(_is_transformers, model.modules()):
        if module.config._attn_implementation != name:
            module.set_attn_implementation(name)
    # It sets configurations of parts that are no models of their own, whatever these compute.
    for config, implementation in implementations:
        if config._attn_implementation == name and _takes_no_name(model, config):
            config._attn_implementation_internal = implementation
    if model.config._attn_implementation != name:
        return Row(what, 1, AS_IT_WAS, "it does not use transformers' AttentionInterface")
    now = AS_IT_WAS if before == name else f"{before} -> {name}"
    if model.dtype in PRODUCTS:
        return Row(what, 1, now)
    kind = str(model.dtype).removeprefix("torch.")
    because = f"{kind} is torch's; bfloat16 and float16, and autocast, run on Warploom"
    return Row(what, 1, now, because)
