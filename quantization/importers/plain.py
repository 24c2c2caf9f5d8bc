"""Plain weights of 8 bits, int8 or e4m3, with a scale a row, a group or a block: of any source."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from warploom.quantization.importers.layer import BlockScaled, Layer, grouped, refused, shaped


def rows(source: str, weight: Tensor, scales: Tensor, size: int) -> Layer:
    """Return the layer of `weight` int8 or e4m3 [n, k] and `scales` [n, ceil(k / size)]."""
    spread, group = grouped(source, scales, size, weight.shape[1])
    if weight.dtype == torch.int8:
        return Layer("int8", weight, spread, None, group)
    return Layer("e4m3", weight.view(torch.uint8), spread, None, group)


def blocks(source: str, weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Layer:
    """Return the layer of `weight` [n, k] and a scale for each block, which rows then have each."""
    n, k = weight.shape
    if min(block) <= 0:
        raise refused(source, f"blocks of {list(block)}", rule="must be positive")
    counts = (-(-n // block[0]), -(-k // block[1]))
    shaped(source, "the scales", scales, counts, f"n = {n}, k = {k} and blocks of {list(block)}")
    layer = rows(source, weight, scales.repeat_interleave(block[0], dim=0)[:n], block[1])
    if block != (128, 128) or weight.dtype != torch.float8_e4m3fn:
        return layer
    return replace(layer, blocks=BlockScaled(weight, scales.float()))
