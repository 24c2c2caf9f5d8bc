"""Packed weights of random numbers, and what stands in for their product."""

from __future__ import annotations

import torch

from benchmarks.peers._mixed_codes import BITS, OFFSETS, Codes, codes_of
from benchmarks.peers._mixed_problem import Kind
from warploom.generator.formats import activations_of
from warploom.quantization import PackedWeight


def random_codes(kind: Kind, n: int, k: int, seed: int = 0) -> Codes:
    """Numbers of a format, any of them, with scales that make weights like k ** -0.5."""
    draws = torch.Generator().manual_seed(seed)

    def below(most: int, *extents: int) -> torch.Tensor:
        return torch.randint(most, extents, generator=draws, dtype=torch.uint8)

    groups = k // (kind.group or k)
    codes = below(2 ** BITS[kind.format], n, k).clamp(min=int(kind.format == "ternary"))
    if kind.format in ("e4m3", "mxfp8"):
        codes = torch.where(codes & 0x7F == 0x7F, 0x30, codes)  # no NaN
    scales = (torch.rand(n, groups, generator=draws) + 0.5) / {"e4m3": 100}.get(kind.format, 5)
    if kind.format == "mxfp8":
        return Codes("mxfp8", codes, 110 + below(8, n, groups))
    if kind.format == "mxfp4":
        return Codes("mxfp4", codes, 120 + below(8, n, groups))
    if kind.format == "nvfp4":
        factors = torch.rand(n, groups, generator=draws).add(0.5).mul(100).to(torch.float8_e4m3fn)
        return Codes("nvfp4", codes, factors, None, torch.tensor(0.002 * k**-0.5))
    zeros = below(17, n, groups) if kind.format == "uint4" else None
    return Codes(kind.format, codes, (scales * k**-0.5).bfloat16(), zeros)


def as_packed(codes: Codes, kind: Kind) -> PackedWeight:
    """The same numbers, packed."""
    numbers, scales = codes.codes, codes.scales
    numbers = numbers.to(torch.int16) - OFFSETS.get(codes.format, 0)
    if codes.format in ("e4m3", "mxfp8"):
        numbers = codes.codes.view(torch.float8_e4m3fn)
    return PackedWeight.from_codes(
        numbers,
        scales,
        codes.zeros,
        format=codes.format,
        group=kind.group,
        activations=activations_of(kind.activations),
        global_scale=codes.global_scale,
    )


def packed(weight: torch.Tensor, kind: Kind) -> PackedWeight:
    """Not quantised at all: random numbers of the weight's extents, others for each weight."""
    n, k = weight.shape
    return as_packed(random_codes(kind, n, k, seed=int(weight[0, 0].float().abs() * 1000)), kind)


def multiplied(
    a: torch.Tensor,
    weight: PackedWeight,
    *,
    out: torch.Tensor,
    scale_a: torch.Tensor | None,
    spec: object,
) -> torch.Tensor:
    """The product, of weights that scales were multiplied into in a's type of 16 bits."""
    w = codes_of(weight).weight()
    x = a.float() @ (w.bfloat16() if a.dtype == torch.bfloat16 else w).float().t()
    return out.copy_(x if scale_a is None else x * scale_a[:, None])
