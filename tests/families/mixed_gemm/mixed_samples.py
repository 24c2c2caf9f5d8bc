"""Weights in every format with what they mean, computed from their codes by its definition."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.generator.formats import Activations
from warploom.quantization import PackedWeight

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
N, K = 136, 256  # no multiple of 64 rows
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

# Format, group and type of scales; each twice, per channel where it may be.
KINDS = (
    ("int4", 128, BF16),
    ("int4", None, FP16),
    ("uint4", 64, FP16),
    ("uint4", None, FP32),
    ("int8", 32, FP32),
    ("int8", None, BF16),
    ("e4m3", 128, BF16),
    ("e4m3", None, FP32),
    ("mxfp4", 32, torch.float8_e8m0fnu),
)


class Sample(NamedTuple):
    """A packed weight, and W [N, K] in float64."""

    packed: PackedWeight
    exact: torch.Tensor


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def activations_of(dtype: torch.dtype) -> Activations:
    return "e4m3" if dtype == E4M3 else "int8" if dtype == torch.int8 else "16-bit"


def sample(
    format: str = "int4",
    group: int | None = 128,
    scale: torch.dtype = BF16,
    *,
    activations: Activations = "16-bit",
    n: int = N,
    k: int = K,
    seed: int = 1,
) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    groups = k // group if group else 1
    low, high = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127)}.get(format, (0, 15))
    codes = torch.randint(low, high + 1, (n, k), generator=generator)
    values, zeros = codes.double(), None
    if format == "e4m3":
        codes = torch.randn(n, k, generator=generator).to(E4M3)
        values = codes.double()
    elif format == "mxfp4":
        values = torch.tensor([*E2M1, *(-one for one in E2M1)]).double()[codes]
    if format == "uint4":
        zeros = torch.randint(0, 17, (n, groups), generator=generator)
        values = values - zeros.repeat_interleave(k // groups, 1)
    if scale.itemsize == 1:
        bits = torch.randint(120, 128, (n, groups), generator=generator, dtype=torch.uint8)
        scales, factors = bits.view(scale), 2.0 ** (bits.double() - 127)
    else:
        scales = (torch.rand(n, groups, generator=generator) / 4 + 0.01).to(scale)
        factors = scales.double()
    packed = PackedWeight.from_codes(
        codes, scales, zeros, format=format, group=group, activations=activations
    )
    return Sample(packed, values * factors.repeat_interleave(k // groups, 1))
