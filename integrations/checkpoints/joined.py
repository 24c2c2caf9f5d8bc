"""Experts that a checkpoint has one by one, and a model of transformers as one tensor of all.

A quantized expert is dequantized to the model's dtype: the layers of such a model take tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from warploom.errors import ProblemError
from warploom.integrations.checkpoints.experts import PARTS

# What checkpoints call gate, up and down of an expert: Qwen's and DeepSeek's, and Mixtral's.
LAYERS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
KEY = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.[\w.]+")

# Gives the weight [n, k] of an expert's layer by its name, dequantized.
Read = Callable[[str, torch.Size], torch.Tensor]


def is_joined(module: Any) -> bool:  # noqa: ANN401 (experts of transformers)
    """Whether a module has the weights of all experts in two tensors of three dimensions."""
    parts = [getattr(module, "_parameters", {}).get(name) for name in PARTS]
    return all(one is not None and one.dim() == 3 for one in parts)


def joined(
    name: str,
    module: Any,  # noqa: ANN401
    keys: Iterable[str],
    read: Read,
    like: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return the weights of all experts, gate and up after one another, by the model's names.

    Args:
        name: The module's name.
        module: Experts of transformers, whose gate_up_proj is [E, 2 I, H] and down_proj [E, H, I].
        keys: Tensors of these experts in the checkpoint, such as `{name}.3.w1.qweight`.
        read: Returns the weight of one layer, of the given shape.
        like: Empty tensors of the shapes, dtypes and devices wanted, by `PARTS`.

    Raises:
        ProblemError: The module has biases, or weights whose inputs come first; or the checkpoint
            has other experts or other layers than the model.
    """
    given = [match for match in map(KEY.fullmatch, keys) if match]
    parts = {match[3] for match in given}
    known = next((one for one in LAYERS if {*one} == parts), None)
    count = like["down_proj"].shape[0]
    numbers = {int(match[2]) for match in given}
    if getattr(module, "has_bias", False) or getattr(module, "is_transposed", False) or not known:
        raise ProblemError(
            f"{name}: quantized experts with {', '.join(sorted(parts))}, in a "
            f"{type(module).__name__}",
            rule="must be experts without biases, of gate, up and down each",
            fix="mixtures of experts of this kind are not read yet",
        )
    if numbers != {*range(count)}:
        raise ProblemError(
            f"{name}: {len(numbers)} experts up to {max(numbers)} in the checkpoint",
            rule=f"must be the model's {count} experts",
            fix="download the checkpoint again, or make the model of its config.json",
        )
    first, second = (like[part] for part in PARTS)
    half = torch.Size((first.shape[1] // 2, first.shape[2]))
    for expert in range(count):
        gate, up, down = (f"{name}.{expert}.{part}" for part in known)
        first[expert, : half[0]] = read(gate, half)
        first[expert, half[0] :] = read(up, half)
        second[expert] = read(down, second.shape[1:])
    return {f"{name}.{part}": like[part] for part in PARTS}
