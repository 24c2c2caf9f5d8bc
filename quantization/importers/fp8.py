"""The "fp8" of transformers and vLLM: e4m3, with a scale for each block, each row, or in all.

Source: transformers 5.23, integrations/finegrained_fp8.py (DeepSeek-V3, Qwen3, Ministral 3).
"""

from __future__ import annotations

import torch

from warploom.quantization.checks import require_fp8_scales
from warploom.quantization.importers.layer import (
    SCALES,
    Config,
    Layer,
    Tensors,
    pair,
    refused,
    required,
)
from warploom.quantization.importers.plain import blocks, rows

SOURCE = "fp8"
NAMES = ("weight", "weight_scale_inv", "weight_scale")
BLOCK = (128, 128)  # where no configuration tells


def read(tensors: Tensors, config: Config) -> Layer:
    """Return the layer of `weight` e4m3 [n, k] and of the scales by which it is multiplied.

    These are `weight_scale_inv`, which vLLM's files call `weight_scale`: one for each block of
    `weight_block_size`, the last ones shorter, or, where that is null, one for each row or in all.

    Raises:
        ProblemError: other shapes or types, or scales under both names.
    """
    weight = required(SOURCE, tensors, "weight", rank=2, types=[torch.float8_e4m3fn])
    name = "weight_scale" if "weight_scale" in tensors else "weight_scale_inv"
    if {"weight_scale", "weight_scale_inv"} <= set(tensors):
        raise refused(SOURCE, "weight_scale and weight_scale_inv", rule="must be one of them")
    types = (*SCALES, torch.float8_e8m0fnu)
    scales = required(SOURCE, tensors, name, rank=(0, 1, 2), types=types)
    require_fp8_scales(f"{SOURCE}: {name}", scales)
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.float()  # powers of two, which fp32 has all of
    n, k = weight.shape
    block = config.get("weight_block_size")
    if block is not None:
        return blocks(SOURCE, weight, scales, pair(SOURCE, "weight_block_size", block))
    if scales.numel() == 1:
        return rows(SOURCE, weight, scales.reshape(1, 1).expand(n, 1), k)
    if tuple(scales.shape) in ((n,), (n, 1)):
        return rows(SOURCE, weight, scales.reshape(n, 1), k)
    if not config:
        return blocks(SOURCE, weight, scales, BLOCK)
    raise refused(
        SOURCE,
        f"{name} is {list(scales.shape)} without a weight_block_size",
        rule=f"must be one scale, or one for each of the {n} rows",
    )
