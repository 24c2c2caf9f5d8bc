"""MXFP8 and MXFP6 as compressed-tensors stores them: powers of two for 32 of k.

Source: compressed-tensors 0.20, compressors/{mxfp6,mxfp8}.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from warploom.quantization.importers.layer import Layer, Tensors, refused, required, shaped

logger = logging.getLogger(__name__)
GROUP = 32
FOUR = 3  # bytes of four values of 6 bits, the first in the lowest bits


def read(source: str, tensors: Tensors) -> Layer:
    """Return the layer of `weight` e4m3 [n, k] and `weight_scale` uint8 [n, k / 32]."""
    weight = required(source, tensors, "weight", rank=2, types=[torch.float8_e4m3fn])
    return _layer(source, tensors, weight)


def six_bits(source: str, tensors: Tensors, name: str) -> Layer:
    """Return the layer of `weight_packed` uint8 [n, 3 k / 4], whose e2m3 are e4m3 exactly.

    Kernels have no format of 6 bits; mxfp8 is the smallest that holds them, and a message says so.
    """
    octets = required(source, tensors, "weight_packed", rank=2, types=[torch.uint8])
    n, bytes_of_row = octets.shape
    if bytes_of_row % FOUR:
        raise refused(
            source, f"weight_packed is {[n, bytes_of_row]}", rule="must have rows of whole 3 bytes"
        )
    logger.info(
        "%s: MXFP6 is stored as mxfp8, which holds it exactly, in 8.25 bits for 6.25",
        name or source,
    )
    low, middle, high = octets.view(n, -1, FOUR).unbind(-1)
    fields = (low, low >> 6 | middle << 2, middle >> 4 | high << 4, high >> 2)
    codes = torch.stack([one & 0x3F for one in fields], -1).flatten(1)
    table = [m / 8 for m in range(8)]
    table += [(1 + m / 8) * 2.0**e for e in range(3) for m in range(8)]
    values = torch.tensor([*table, *(-one for one in table)], device=codes.device)
    return _layer(source, tensors, values.to(torch.float8_e4m3fn)[codes.int()])


def is_six_bits(packed: Tensor, scales: Tensor) -> bool:
    """Whether there are as many bytes for a scale as 32 values of 6 bits have."""
    return (
        packed.dim() == scales.dim() == 2 and packed.shape[1] == scales.shape[1] * GROUP * FOUR // 4
    )


def _layer(source: str, tensors: Tensors, codes: Tensor) -> Layer:
    n, k = codes.shape
    scales = required(source, tensors, "weight_scale", rank=2, types=[torch.uint8])
    if k % GROUP:
        raise refused(source, f"k = {k}", rule=f"must be a multiple of {GROUP}")
    shaped(source, "weight_scale", scales, (n, k // GROUP), f"n = {n}, k = {k}")
    return Layer("mxfp8", codes.view(torch.uint8), scales, None, GROUP)
