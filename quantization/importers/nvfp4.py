"""NVFP4 as compressed-tensors and as ModelOpt store it: e2m1, e4m3 scales by 16, and a global one.

Source: compressed-tensors 0.20, compressors/nvfp4; ModelOpt 0.39, torch/export (weight_scale_2).
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from warploom.printable import brief
from warploom.quantization.importers.layer import (
    Config,
    Layer,
    Tensors,
    mapping,
    nibbles,
    refused,
    required,
    shaped,
    strings,
    whole,
    word,
)

MODELOPT = "modelopt"
NAMES = ("weight", "weight_scale", "weight_scale_2", "pre_quant_scale")
GROUP = 16
SCALE = (torch.float32,)


def compressed(source: str, tensors: Tensors) -> Layer:
    """Return the layer of `weight_packed`, `weight_scale` and the `weight_global_scale` it has.

    That divides: compressed-tensors stores the factor by which scales were multiplied.
    """
    given = required(source, tensors, "weight_global_scale", rank=(0, 1), types=SCALE)
    divisor = _global(source, "weight_global_scale", given)
    return _layer(source, tensors, "weight_packed", 1 / divisor)


def modelopt(tensors: Tensors, config: Config, name: str) -> Layer:
    """Return the layer of `weight`, `weight_scale` and `weight_scale_2`, which multiplies.

    Raises:
        ProblemError: another algorithm or group, a layer that is left out, other shapes and types.
    """
    settings = mapping(MODELOPT, config, "quantization") or config  # as hf_quant_config.json has it
    kind = word(MODELOPT, settings, "quant_algo", "NVFP4")
    if kind not in ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"):
        raise refused(MODELOPT, f"quant_algo {brief(kind)}", rule="must be NVFP4")
    if kind == "NVFP4_AWQ" or "pre_quant_scale" in tensors:
        raise refused(
            MODELOPT,
            "activations that are scaled first (AWQ)",
            rule="a weight alone is not the layer",
            fix="export the model with quant_algo NVFP4",
        )
    size = whole(MODELOPT, settings, "group_size", GROUP)
    if size != GROUP:
        raise refused(MODELOPT, f"group_size {size}", rule=f"must be {GROUP}")
    for field in ("exclude_modules", "ignore"):
        if name and _left_out(name, strings(MODELOPT, settings, field)):
            raise refused(
                MODELOPT,
                f"{brief(name)} is not quantized",
                rule=f"{field} leaves it out",
                fix="read its weight as it is",
            )
    given = required(MODELOPT, tensors, "weight_scale_2", rank=(0, 1), types=SCALE)
    return _layer(MODELOPT, tensors, "weight", _global(MODELOPT, "weight_scale_2", given))


def _left_out(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, one) or name.startswith(f"{one}.") for one in patterns)


def _layer(source: str, tensors: Tensors, packed: str, global_scale: Tensor) -> Layer:
    """Bytes [n, k / 2], the low half first, e4m3 scales [n, k / 16], and what multiplies all."""
    halves = required(source, tensors, packed, rank=2, types=[torch.uint8])
    scales = required(source, tensors, "weight_scale", rank=2, types=[torch.float8_e4m3fn])
    n, k = halves.shape[0], halves.shape[1] * 2
    if k % GROUP:
        raise refused(source, f"k = {k}", rule=f"must be a multiple of {GROUP}")
    shaped(source, "weight_scale", scales, (n, k // GROUP), f"n = {n}, k = {k}")
    return Layer("nvfp4", nibbles(halves), scales, None, GROUP, global_scale=global_scale)


def _global(source: str, name: str, scale: Tensor) -> Tensor:
    """The one number of a tensor, once it is known to be finite and not 0: fp32 []."""
    if scale.numel() != 1:
        raise refused(source, f"{name} is {list(scale.shape)}", rule="must be one number")
    number = scale.detach().reshape(())
    if not bool(torch.isfinite(number) & (number != 0)):
        raise refused(source, f"{name} {number.item():g}", rule="must be finite, and not be 0")
    return number
