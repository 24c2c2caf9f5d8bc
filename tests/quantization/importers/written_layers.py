"""Layers as the packages write them, from whole codes, scales and zero points: small writers.

Each returns the tensors and the weight [n, k] in float64. None shares code with the importers.
"""

from __future__ import annotations

import torch
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word has


def words(codes: Tensor, bits: int) -> Tensor:
    """[rows, columns] -> int32 [rows bits / 32, columns], the first row in the lowest bits."""
    per = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, 0, 0, -len(codes) % per))
    fields = padded.reshape(-1, per, codes.shape[1])
    packed = sum((fields[:, i] << (bits * i) for i in range(per)), torch.zeros(1).long())
    return ((packed + 2**31) % 2**32 - 2**31).to(torch.int32)


def weight_of(codes: Tensor, zeros: Tensor, scales: Tensor, size: int) -> Tensor:
    """scale (code - zero) of codes [n, k] and of scales and zero points [n, groups]."""
    wide = (one.double().repeat_interleave(size, 1)[:, : codes.shape[1]] for one in (zeros, scales))
    zero, scale = wide
    return (codes.double() - zero) * scale


def drawn(
    n: int, k: int, size: int, bits: int = 4, *, symmetric: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, k], zero points from 1 on and fp16 scales [n, groups]."""
    draw = torch.Generator().manual_seed(seed)
    groups = -(-k // size)
    codes = torch.randint(0, 1 << bits, (n, k), generator=draw)
    zeros = torch.randint(1, 1 << bits, (n, groups), generator=draw)
    scales = (torch.rand(n, groups, generator=draw) * 0.02 + 0.005).half()
    return codes, torch.full_like(zeros, 1 << bits - 1) if symmetric else zeros, scales


def gptq(
    n: int, k: int, size: int, bits: int = 4, *, symmetric: bool, version: int, g_idx: bool = True
) -> Written:
    """qweight, qzeros, scales and g_idx of v1 or v2."""
    codes, zeros, scales = drawn(n, k, size, bits, symmetric=symmetric)
    tensors = {
        "qweight": words(codes.t(), bits),
        "qzeros": words(zeros - int(version == 1), bits).t().contiguous(),
        "scales": scales.t().contiguous(),
    }
    if g_idx:
        tensors["g_idx"] = (torch.arange(k) // size).int()
    return tensors, weight_of(codes, zeros, scales, size)


def awq(n: int, k: int, size: int, *, symmetric: bool) -> Written:
    """qweight, qzeros and scales of AutoAWQ's layout gemm."""
    codes, zeros, scales = drawn(n, k, size, symmetric=symmetric)

    def packed(values: Tensor) -> Tensor:
        ordered = values.t().reshape(values.shape[1], -1, 8)[..., list(AWQ_ORDER)]
        return words(ordered.flatten(1).t(), 4).t().contiguous()

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.t().contiguous()}
    return tensors, weight_of(codes, zeros, scales, size)


def pack_quantized(n: int, k: int, size: int, *, symmetric: bool) -> Written:
    """compressed-tensors' packed layout: codes along k, zero points along n."""
    codes, zeros, scales = drawn(n, k, size, symmetric=symmetric)
    tensors = {
        "weight_packed": words(codes.t(), 4).t().contiguous(),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros, 4)
    return tensors, weight_of(codes, zeros, scales, size)


def whole_bytes(n: int, k: int, size: int, *, symmetric: bool) -> Written:
    """compressed-tensors' 4 bits in int8 from -8 to 7, zero points as well."""
    codes, zeros, scales = drawn(n, k, size, symmetric=symmetric)
    tensors = {"weight": (codes - 8).to(torch.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 8).to(torch.int8)
    return tensors, weight_of(codes, zeros, scales, size)
