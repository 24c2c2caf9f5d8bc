"""Quantized weights of random bytes: every code, scales of all sizes and signs, any padding."""

from __future__ import annotations

import torch

from warploom.generator.families.dequantize import DequantizeOperation, DequantizeSchedule
from warploom.generator.formats import FORMATS
from warploom.generator.specification import KernelSpec
from warploom.quantization import Metadata, PackedExperts

EVERY = [
    (row.name, group, scale, activations)
    for row in FORMATS.values()
    for activations in row.orders
    for group, scale in zip(row.groups, row.scales * len(row.groups), strict=False)
]
"""Each format in each order of its codes, with each group, and scales of each type in turn."""


def spec(
    kind: tuple[str, int | None, str, str], w: str = "bf16", slabs: int = 2, ctas: int = 6
) -> KernelSpec:
    """A kernel of a format, a group, a type of scales and activations."""
    name, group, scale, activations = kind
    operation = DequantizeOperation(w, name, group or 0, scale, activations)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, DequantizeSchedule(slabs, ctas))  # type: ignore[arg-type]


def experts(
    kind: tuple[str, int | None, str, str], count: int, n: int, k: int, seed: int = 0
) -> PackedExperts:
    """Experts of random bytes, of which none stands for NaN."""
    name, group, scale, activations = kind
    metadata = Metadata(name, group, scale, activations, n, k)
    random, slab = torch.Generator().manual_seed(seed + n + k), metadata.slab
    made = PackedExperts.empty(count, metadata)
    made.slabs.copy_(_bytes(made.slabs.shape, random))
    codes = made.slabs[..., : slab.codes_bytes]
    if slab.row.nans:
        codes[(codes & 0x7F) == 0x7F] ^= 1
    end = slab.codes_bytes + slab.scales_bytes
    scales = _scales(scale, (*codes.shape[:-1], slab.groups * 64), random)
    made.slabs[..., slab.codes_bytes : end] = scales.view(torch.uint8)
    made.slabs[..., end:] = _bytes((*codes.shape[:-1], slab.zeros_bytes), random) % 17
    if made.channel_scales is not None:
        kept = "fp32" if slab.row.scaled_twice else scale
        made.channel_scales.copy_(_scales(kept, made.channel_scales.shape, random))
    if made.channel_zeros is not None:
        made.channel_zeros.copy_(_bytes(made.channel_zeros.shape, random) % 17)
    return made


def rows_spec(w: str = "bf16", scale: str = "fp32", slabs: int = 2, ctas: int = 6) -> KernelSpec:
    """A kernel of e4m3 rows, with scales of a type."""
    operation = DequantizeOperation(w, "e4m3", 128, scale, layout="rows")  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, DequantizeSchedule(slabs, ctas))  # type: ignore[arg-type]


def rows(
    kernel: KernelSpec, count: int, n: int, k: int, apart: int = 0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes in rows and scales of their blocks, both with elements between."""
    random, scale = torch.Generator().manual_seed(seed + n + k), kernel.operation.scale  # type: ignore[attr-defined]
    data = _bytes((count, n, k + apart), random)[..., :k].view(torch.float8_e4m3fn)
    blocks = count, -(-n // 128), -(-k // 128) + apart
    found = _scales(scale, blocks, random)[..., : -(-k // 128)]
    return data, found.view(torch.float8_e8m0fnu) if scale == "e8m0" else found


def _bytes(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.randint(256, tuple(shape), generator=random, dtype=torch.uint8)


def _scales(name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Scales of all sizes that are finite in their type; powers of two as bytes."""
    if name in ("e8m0", "e4m3"):
        found = _bytes(shape, random)
        return found % 255 if name == "e8m0" else found ^ ((found & 0x7F) == 0x7F)
    reach = 12 if name == "fp16" else 60
    sizes = torch.randint(-reach, reach, tuple(shape), generator=random)
    values = torch.randn(tuple(shape), generator=random) * torch.exp2(sizes.float())
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    return values.clamp(-60000, 60000).to(kinds[name]) if name == "fp16" else values.to(kinds[name])
