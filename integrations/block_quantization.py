"""Activations in e4m3 with a scale for each 1x128, by torch's operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from warploom.generator.families.gemm import SCALE_BLOCK

E4M3 = torch.float8_e4m3fn


class QuantizedBlocks(NamedTuple):
    """Rows [.., K]: `values` in e4m3, times `scale` [.., K/128] in fp32."""

    values: torch.Tensor
    scale: torch.Tensor


def quantize_rows(x: torch.Tensor) -> QuantizedBlocks:
    """Quantise each 1x128 of x so that its largest magnitude just fits.

    Args:
        x: [.., K] of bf16, fp16 or fp32; the last block may be short.

    Returns:
        The values in e4m3 and a scale for each block: 0 where all of it is 0. NaN and infinities
        make their own blocks NaN.
    """
    k = x.shape[-1]
    missing = -k % SCALE_BLOCK
    blocks = functional.pad(x, (0, missing)).unflatten(-1, (-1, SCALE_BLOCK)).float()  # type: ignore[no-untyped-call]
    scale = blocks.abs().amax(-1) / torch.finfo(E4M3).max
    divided = blocks / torch.where(scale == 0, 1, scale).unsqueeze(-1)
    return QuantizedBlocks(divided.to(E4M3).flatten(-2)[..., :k], scale)
