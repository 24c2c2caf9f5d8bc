"""The "fp8" of transformers, in which DeepSeek-V3 and Qwen3 are published: e4m3, a scale a block.

Source: transformers 5.23, integrations/finegrained_fp8.py.
"""

from __future__ import annotations

import torch

from warploom.quantization.importers.layer import (
    SCALES,
    Config,
    Layer,
    Tensors,
    refused,
    required,
)
from warploom.quantization.importers.plain import blocks

SOURCE = "fp8"


def read(tensors: Tensors, config: Config) -> Layer:
    """Return the layer of `weight` e4m3 [n, k] and `weight_scale_inv`, by which it is multiplied.

    weight_scale_inv: a scale for each of the blocks of `weight_block_size`, the last ones shorter.

    Raises:
        ProblemError: no blocks, other shapes or types.
    """
    weight = required(SOURCE, tensors, "weight", rank=2, types=[torch.float8_e4m3fn])
    scales = required(SOURCE, tensors, "weight_scale_inv", rank=2, types=SCALES)
    block = config.get("weight_block_size") if config else [128, 128]
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise refused(SOURCE, f"weight_block_size {block!r}", rule="must be two extents, n and k")
    return blocks(SOURCE, weight, scales, (int(block[0]), int(block[1])))
