"""What compiled models of transformers are told of sequences: that these are not packed.

transformers looks for packed sequences in position ids. A compiled graph cannot look, and so is
given a mask as a tensor, even where the model has made the position ids itself, one after another.
A model with this hook hands on that its caller named neither a mask, nor position ids, nor a cache:
by an attention mask of no batches, which no caller has, and which `transformers_masks` knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

MODELS = ("llama", "mistral", "qwen2", "qwen3")  # whose attention mask goes to masks alone
_NAMED = ("attention_mask", "position_ids", "past_key_values")


def hook(model: torch.nn.Module) -> None:
    """Hook the parts of a model that make masks."""
    for part in _parts(model):
        part.register_forward_pre_hook(_mark, with_kwargs=True)


def unhook(model: torch.nn.Module) -> None:
    """Remove the hooks that there are: a handle may be lost to an interrupt before it is kept."""
    for part in _parts(model):
        for number, found in list(part._forward_pre_hooks.items()):
            if found is _mark:
                part._forward_pre_hooks_with_kwargs.pop(number, None)
                part._forward_pre_hooks.pop(number, None)


def marks(attention_mask: object, batch_size: int) -> bool:
    """Whether a mask is the one of no batches."""
    return isinstance(attention_mask, torch.Tensor) and len(attention_mask) == 0 and batch_size != 0


def _parts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for part in model.modules():
        if type(part).__name__.removesuffix("Model").lower() in MODELS:
            yield part


def _mark(
    part: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add the mask of no batches to a call that is traced, where it says what is true."""
    if not torch.compiler.is_compiling():
        return None
    if arguments[1:] or any(keywords.get(name) is not None for name in _NAMED):
        return None
    given = [*arguments, keywords.get("input_ids"), keywords.get("inputs_embeds")]
    inputs = next((one for one in given if one is not None), None)
    if inputs is None:
        return None
    mask = inputs.new_empty((0, inputs.shape[1]), dtype=torch.bool)
    return arguments, {**keywords, "attention_mask": mask}
