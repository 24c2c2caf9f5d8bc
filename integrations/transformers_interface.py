"""Which models of transformers take an attention by name, through its AttentionInterface.

A model with an attention of its own asks for masks by the same name: it would get those that
Warploom's attention reads, None among them, and lose causality or padding. Models that compute with
their masks, by what transformers' own attentions get, must get the same. Masks are made for a
configuration, so the model is found by it.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from warploom.errors import ProblemError

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what a model's source looks attentions up in
_ATTENTION = re.compile(
    r"^class \w*(Attention|Attn)\w*\(([\w.]+, *)*(\w+\.)*Module\b", re.MULTILINE
)
_NAMES_SDPA = re.compile(r"\b_attn_implementation\s*==\s*[\"']sdpa")
Kind = Literal["any", "not none", "eager"]
_known: dict[int, tuple[weakref.ref[Any], Kind]] = {}  # what was told of configurations, by id


def mask_kind(config: Any, name: str) -> Kind:  # noqa: ANN401
    """Which masks the models of a configuration take; asked for each mask.

    "eager" is a mask that is added to scores. A model that says of itself that it supports none of
    SDPA, FlashAttention and flex attention may leave out that its layers are not causal, or compute
    with its masks: it takes no mask but this one. "not none" is a mask that says what it masks: a
    model that compares the name with "sdpa" may drop rows of a mask, or rows without a mask.

    Args:
        config: What a mask is made for; anything else where the caller is no model.
        name: The `attn_implementation` that asks for the mask.

    Raises ProblemError where the model does not use AttentionInterface.
    """
    if not isinstance(config, PreTrainedConfig):
        return "any"
    refused, kind = _support(config)
    _require_none(refused, name)
    return kind


def adds_masks(config: Any) -> bool:  # noqa: ANN401
    """Whether the models of a configuration know eager attention alone, which adds a mask.

    Without a mask their rows attend to every key. That a layer is causal says nothing: in
    BridgeTower, the layers between text and image say so.
    """
    return isinstance(config, PreTrainedConfig) and _support(config)[1] == "eager"


def _support(config: PreTrainedConfig) -> tuple[str, Kind]:
    """The name of a model to refuse, or "", and which masks the models of a configuration take."""
    if torch.compiler.is_compiling():
        by_class: tuple[str, Kind] = _told_by_class(type(config))
        return by_class
    known = _known.get(id(config))
    if known is not None and known[0]() is config:
        return "", known[1]
    refused, kind = _told(config)
    if not refused:
        _known[id(config)] = weakref.ref(config, partial(_forget, id(config))), kind
    return refused, kind


def _require_none(model: str, name: str) -> None:
    """Raise ProblemError for the name of a model that does not use the interface."""
    if model:
        raise ProblemError(
            f"attn_implementation={name!r} for {model}",
            rule="must be for a model that uses transformers' AttentionInterface: this one has an "
            "attention of its own, which would lose its mask",
            fix='use attn_implementation="eager"; for a part of a model, a dict as '
            '{"text_config": "eager"}. warploom.patch(model) leaves such attention as it is',
        )


def uses_interface(model: type[PreTrainedModel]) -> bool:
    """Whether a class of models, and each that it extends, looks its attention up by name.

    Told by the source, as by `_can_set_attn_implementation`, whose answer for a class is taken for
    all that extend it. Sources of transformers 4 index the interface, and have no `get_interface`.
    """
    kinds = (one for one in model.__mro__ if issubclass(one, PreTrainedModel))
    return all(_source_uses(one) for one in kinds if one is not PreTrainedModel)


def part_of(model: torch.nn.Module, config: object) -> PreTrainedModel | None:
    """The innermost model of transformers in a module that has a configuration; None without."""
    parts = (one for one in model.modules() if isinstance(one, PreTrainedModel))
    return next(reversed([one for one in parts if one.config is config]), None)


def models_of(config: type) -> list[type[PreTrainedModel]]:
    """The classes of models, among those imported, for a class of configurations.

    Where none names it, for the nearest one that it extends.
    """
    models = [*_subclasses(PreTrainedModel)]
    for kind in config.__mro__:
        found = [one for one in models if kind in _configurations(one)]
        if found:
            return found
    return []


def _configurations(model: type[PreTrainedModel]) -> tuple[object, ...]:
    """The classes that a model's configuration may have: a class, or a union of some."""
    return get_args(model.config_class) or (model.config_class,)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _told_by_class(config: type) -> tuple[str, Kind]:
    """The name of a model to refuse, or "", and which masks it takes, by a class alone.

    Where models differ, the best is taken: a compiled graph cannot look at who asks.
    """
    models = models_of(config)
    uses = not models or any(map(uses_interface, models))
    return "" if uses else _name(models), _kind(models)


def _told(config: object) -> tuple[str, Kind]:
    """The same of a configuration. Where models for its class differ, that which asks is told."""
    models = models_of(type(config))
    if len({(uses_interface(one), _supports_others(one)) for one in models}) > 1:
        asking = _asking(config)
        if asking is not None:
            own = type(asking)
            return "" if uses_interface(own) else own.__name__, _kind([own])
    refused, kind = _told_by_class(type(config))
    return refused, kind


def _kind(models: list[type[PreTrainedModel]]) -> Kind:
    if models and not any(map(_supports_others, models)):
        return "eager"
    return "not none" if any(_NAMES_SDPA.search(_source(one)) for one in models) else "any"


def _supports_others(model: type[PreTrainedModel]) -> bool:
    """Whether a class of models says that its layers work by another attention than eager."""
    others = getattr(model, "_supports_flash_attn", True) or getattr(
        model, "_supports_flex_attn", True
    )
    backend = getattr(model, "_supports_attention_backend", False)
    return bool(model._supports_sdpa or (backend and others))


def _name(models: list[type[PreTrainedModel]]) -> str:
    """The first class that is no base class of others, as BloomModel."""
    names = [one.__name__ for one in models]
    return next((one for one in names if "PreTrained" not in one), "".join(names[:1]))


def _asking(config: object) -> PreTrainedModel | None:
    """The model that asks for a mask, among the callers of this function."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, PreTrainedModel):
            found = part_of(caller, config)
            if found is not None:
                return found
        frame = frame.f_back
    return None


def _source_uses(model: type[PreTrainedModel]) -> bool:
    """Whether the module that defines a class looks attentions up, or has none of its own."""
    source = _source(model)
    return bool(source) and (_INTERFACE in source or not _ATTENTION.search(source))


def _source(model: type[PreTrainedModel]) -> str:
    """The source of the module that defines a class; "" where there is none, as of a notebook's."""
    module = sys.modules.get(model.__module__)
    try:
        return "" if module is None else inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def _subclasses(kind: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _forget(number: int, reference: weakref.ref[Any]) -> None:
    """Drop a configuration that is no more, unless its id is another's by now."""
    known = _known.get(number)
    if known is not None and known[0] is reference:
        del _known[number]
