"""Which ways to save a model are refused while it has quantized layers.

`save_pretrained` of transformers and diffusers writes a configuration from which `from_pretrained`
makes the model anew. It would make torch.nn.Linear, find no weights for them, and fill them with
random numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from warploom.errors import ProblemError

_CLASSES = {  # modules and their classes of models
    "transformers.modeling_utils": "PreTrainedModel",
    "diffusers.models.modeling_utils": "ModelMixin",
}
_METHODS = ("save_pretrained", "push_to_hub")
_guarded: set[type] = set()


def guard(layer: type[torch.nn.Module]) -> None:
    """Let the models of libraries that are loaded refuse to be saved with a `layer` in them.

    Quantized layers call this whenever one is made or its state is read: a library may be loaded
    after warploom, and a layer put into a model by hand.
    """
    for module, name in _CLASSES.items():
        found = getattr(sys.modules.get(module), name, None)
        if found is None or found in _guarded:
            continue
        _guarded.add(found)
        for method in _METHODS:
            setattr(found, method, _refusing(getattr(found, method), layer))


def _refusing(save: Callable[..., Any], layer: type[torch.nn.Module]) -> Callable[..., Any]:
    @functools.wraps(save)
    def checked(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        only_adapters = getattr(model, "_hf_peft_config_loaded", False)
        if not only_adapters:
            _check(model, save.__name__, layer)
        return save(model, *args, **kwargs)

    return checked


def _check(model: torch.nn.Module, method: str, layer: type[torch.nn.Module]) -> None:
    """Raise ProblemError for a model with quantized layers, before anything is written."""
    names = [name for name, module in model.named_modules() if isinstance(module, layer)]
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise ProblemError(
            f"{method} of a {type(model).__name__} with quantized layers ({names[0]}{more})",
            rule="must be of a model without them: from_pretrained would give them random weights",
            fix="save the model before it is quantized, and patch it where it is loaded; or "
            "torch.save(model.state_dict(), path), which loads into a model that is patched alike",
        )
