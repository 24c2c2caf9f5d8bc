"""MXFP4 blocks and scales as gpt-oss stores its experts, and as compressed-tensors stores a layer.

Source: transformers 5.23, integrations/mxfp4.py; the OCP Microscaling Formats specification, 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.printable import brief
from warploom.quantization.importers.layer import (
    Layer,
    Tensors,
    nibbles,
    refused,
    required,
    shaped,
)

SOURCE = "MXFP4"
NAMES = ("blocks", "scales")
GROUP = 32


def read(tensors: Tensors, expert: int | None) -> Layer:
    """Return the layer of `blocks` [experts, n, groups, 16] and `scales` [experts, n, groups].

    Both are uint8: two e2m1 a byte, low half first, and exponents plus 127. Without the dimension
    of experts they are one layer.

    Raises:
        ProblemError: no `expert` of several is named, other shapes or types.
    """
    several = tensors.get("blocks")
    experts = isinstance(several, Tensor) and several.dim() == 4
    blocks = required(SOURCE, tensors, "blocks", rank=3 + experts, types=[torch.uint8])
    scales = required(SOURCE, tensors, "scales", rank=2 + experts, types=[torch.uint8])
    shaped(SOURCE, "scales", scales, tuple(blocks.shape[:-1]), f"blocks {list(blocks.shape)}")
    shaped(SOURCE, "blocks", blocks, (*blocks.shape[:-1], GROUP // 2), "32 values a scale")
    if experts:
        if type(expert) is not int or not 0 <= expert < len(blocks):
            raise refused(
                SOURCE,
                f"{len(blocks)} experts, expert={brief(expert)}",
                rule="a quantized weight is one expert's",
                fix=f"pass expert=0 to {len(blocks) - 1}",
            )
        blocks, scales = blocks[expert], scales[expert]
    elif expert is not None and (type(expert) is not int or expert != 0):
        raise refused(SOURCE, f"expert={brief(expert)} of a layer without experts")
    return layer(blocks.flatten(-2), scales)


def layer(halves: Tensor, scales: Tensor) -> Layer:
    """Return the layer of bytes [n, k / 2], low half first, and exponents [n, k / 32]."""
    return Layer("mxfp4", nibbles(halves), scales, None, GROUP)
