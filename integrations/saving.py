"""How models with quantized layers are saved by `save_pretrained`, and where that is refused.

`save_pretrained` of transformers and diffusers writes a configuration from which `from_pretrained`
makes the model anew. That of transformers is made to say which layers are quantized. That of
diffusers has no place for it: it would make torch.nn.Linear, find no weights for them, and fill
them with random numbers.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

import warploom
from warploom.errors import ProblemError

_TRANSFORMERS = "transformers.modeling_utils"
_CLASSES = {  # modules and their classes of models
    _TRANSFORMERS: "PreTrainedModel",
    "diffusers.models.modeling_utils": "ModelMixin",
}
_METHODS = ("save_pretrained", "push_to_hub")
_guarded: set[type] = set()


def guard(layer: type[torch.nn.Module]) -> None:
    """Let the models of libraries that are loaded say that they have a `layer`, or not be saved.

    Quantized layers call this whenever one is made or its state is read: a library may be loaded
    after warploom, and a layer put into a model by hand. If the first to read its state is a save,
    this save is refused after it wrote the configuration; if such a save is given a state_dict=, it
    is not refused.
    """
    unguarded: list[Callable[..., Any]] = []
    for module, name in _CLASSES.items():
        found = getattr(sys.modules.get(module), name, None)
        if found is None or found in _guarded:
            continue
        _guarded.add(found)
        for method in _METHODS:
            save = getattr(found, method)
            unguarded.append(save)
            setattr(found, method, _refusing(save, layer))
    for save in unguarded:
        _refuse_running(save, layer)


def _refuse_running(save: Callable[..., Any], layer: type[torch.nn.Module]) -> None:
    """Check the model of a call of `save` that began before it was guarded, and that goes on."""
    code = getattr(inspect.unwrap(save), "__code__", None)
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            _check(frame.f_locals[code.co_varnames[0]], save.__name__, layer)
        frame = frame.f_back


def _refusing(save: Callable[..., Any], layer: type[torch.nn.Module]) -> Callable[..., Any]:
    @functools.wraps(save)
    def checked(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not _whole(model) or not any(isinstance(one, layer) for one in model.modules()):
            return save(model, *args, **kwargs)
        if not isinstance(model, getattr(sys.modules.get(_TRANSFORMERS), "PreTrainedModel", ())):
            _check(model, save.__name__, layer)
        with warploom.WarploomConfig.described(model):  # loaded now: it needs transformers
            return save(model, *args, **kwargs)

    return checked


def _whole(model: torch.nn.Module) -> bool:
    """Whether all of a model is saved; of one with adapters of peft, these alone are."""
    return not getattr(model, "_hf_peft_config_loaded", False)


def _check(model: torch.nn.Module, method: str, layer: type[torch.nn.Module]) -> None:
    """Raise ProblemError for a model with quantized layers, unless only adapters are saved."""
    if not _whole(model):
        return
    names = [name for name, module in model.named_modules() if isinstance(module, layer)]
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise ProblemError(
            f"{method} of a {type(model).__name__} with quantized layers ({names[0]}{more})",
            rule="must be of a model without them: from_pretrained would give them random weights",
            fix="save a model of transformers once more: it is known to have such layers now; save "
            "another before it is quantized, and patch it where it is loaded, or "
            "torch.save(model.state_dict(), path), which loads into a model that is patched in the "
            "same way",
        )
