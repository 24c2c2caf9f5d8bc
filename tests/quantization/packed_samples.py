"""Codes, scales and zero points to pack, of every format."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.generator.formats import FORMATS, Activations
from warploom.quantization import PackedWeight

# A case of each order of codes, of groups and none, and of all types of scales.
Kind = tuple[str, int | None, str, Activations]
KINDS: list[Kind] = [
    ("int4", 128, "bf16", "16-bit"),
    ("int4", 32, "fp16", "e4m3"),
    ("int4", 64, "fp32", "int8"),
    ("int4", None, "fp32", "16-bit"),
    ("uint4", 64, "bf16", "16-bit"),
    ("uint4", 32, "fp32", "16-bit"),
    ("uint4", None, "fp16", "16-bit"),
    ("uint4", 128, "bf16", "e4m3"),
    ("uint4", 32, "fp16", "int8"),
    ("int8", 128, "fp16", "16-bit"),
    ("int8", None, "bf16", "int8"),
    ("e4m3", 64, "bf16", "16-bit"),
    ("e4m3", None, "fp32", "16-bit"),
    ("e4m3", 128, "bf16", "e4m3"),
    ("mxfp4", 32, "e8m0", "16-bit"),
    ("mxfp4", 32, "e8m0", "e4m3"),
    ("mxfp8", 32, "e8m0", "16-bit"),
    ("mxfp8", 32, "e8m0", "e4m3"),
    ("nvfp4", 16, "e4m3", "16-bit"),
    ("int2", 64, "bf16", "16-bit"),
    ("int2", None, "fp32", "int8"),
    ("ternary", None, "bf16", "16-bit"),
    ("ternary", 128, "fp16", "int8"),
]
SCALES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def drawn(
    format: str, group: int | None, scale: str, n: int, k: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [n, k], scales and zero points [n, groups], of the types that `unpack` returns."""
    chance = torch.Generator().manual_seed(seed)
    row = FORMATS[format]
    codes = torch.randint(row.lowest, row.highest + 1, (n, k), generator=chance, dtype=torch.int16)
    if row.nans:
        codes[(codes & 127) == 127] -= 1
    codes = codes.to(torch.int8 if row.lowest < 0 else torch.uint8)
    if row.nans:
        codes = codes.view(torch.float8_e4m3fn)
    shape = (n, k // group if group else 1)
    if scale == "e8m0":
        bits = torch.randint(0, 127, shape, generator=chance, dtype=torch.uint8)
        scales = bits.view(torch.float8_e8m0fnu)
    elif scale == "e4m3":
        bits = torch.randint(0, 127, shape, generator=chance, dtype=torch.uint8)
        scales = bits.view(torch.float8_e4m3fn)
    else:
        scales = torch.randn(shape, generator=chance).to(SCALES[scale])
    zeros = None
    if format == "uint4":
        zeros = torch.randint(0, 17, shape, generator=chance, dtype=torch.uint8)
    return codes, scales, zeros


def packed(
    format: str,
    group: int | None,
    scale: str,
    activations: Activations,
    n: int,
    k: int,
    seed: int = 0,
) -> PackedWeight:
    codes, scales, zeros = drawn(format, group, scale, n, k, seed)
    return PackedWeight.from_codes(
        codes, scales, zeros, format=format, group=group, activations=activations
    )


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Of one type and shape, and bit by bit the same."""
    if one is None or other is None:
        return one is other
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
