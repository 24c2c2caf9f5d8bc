"""How far the tensor core's sums may be off."""

from __future__ import annotations

import math

import torch


def accumulated(dtype: torch.dtype, k: int, accumulation: str = "fast") -> float:
    """The error of a dot product of length k, relative to |a| |b|, on Hopper's tensor cores.

    16-bit types: products are exact, sums are truncated to about 22 bits each wgmma k, promoted
    only those over 64, which fp32 adds up. fp8 keeps about 14 bits, the first one counted, of the
    largest product in each wgmma k and of the sum before it; promoted, it does so for sums over
    128, and fp32 for the rest. int8 is exact.

    Of fp8 this is for terms of both signs. Each product of a wgmma is truncated by itself, at the
    last bit of the sum so far: where all have one sign these errors do, too, and a sum loses up to
    33 times as much.
    """
    if dtype == torch.int8:
        return 0.0
    if dtype.itemsize == 2 and accumulation == "promoted":
        return accumulated(dtype, min(k, 64)) + 2.0**-24 * math.ceil(k / 64)
    if dtype.itemsize == 1 and accumulation == "promoted":
        return accumulated(dtype, min(k, 128)) + 2.0**-24 * math.ceil(k / 128)
    if dtype.itemsize == 1:
        return 2.0**-13 * (1 + math.ceil(max(k, 1) / 32))
    return 2.0**-22 * math.ceil(max(k, 1) / 16)
