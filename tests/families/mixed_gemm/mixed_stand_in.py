"""Stands in for a packed weight and its product: plain numbers, multiplied in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.peers._mixed_codes import BITS, Codes
from benchmarks.peers._mixed_problem import Kind


@dataclass(frozen=True)
class Metadata:
    """What a packed weight is in."""

    format: str


class StandIn:
    """A packed weight that keeps its numbers as they are."""

    def __init__(self, codes: Codes) -> None:
        self.codes, self.metadata = codes, Metadata(codes.format)

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes, scales and zero points in the types of the format."""
        codes, scales = self.codes.codes, self.codes.scales
        if self.codes.format == "int4":
            codes = (codes.to(torch.int16) - 8).to(torch.int8)
        if self.codes.format == "e4m3":
            codes = codes.view(torch.float8_e4m3fn)
        if self.codes.format == "mxfp4":
            scales = scales.view(torch.float8_e8m0fnu)
        return codes, scales, self.codes.zeros


def random_codes(kind: Kind, n: int, k: int, seed: int = 0) -> Codes:
    """Numbers of a format, any of them, with scales that make weights like k ** -0.5."""
    draws = torch.Generator().manual_seed(seed)

    def below(most: int, *extents: int) -> torch.Tensor:
        return torch.randint(most, extents, generator=draws, dtype=torch.uint8)

    groups = k // (kind.group or k)
    codes = below(2 ** BITS[kind.format], n, k)
    if kind.format == "e4m3":
        codes = torch.where(codes & 0x7F == 0x7F, 0x30, codes)  # no NaN
    scales = (torch.rand(n, groups, generator=draws) + 0.5) / {"e4m3": 100}.get(kind.format, 5)
    if kind.format == "mxfp4":
        return Codes("mxfp4", codes, 120 + below(8, n, groups))
    zeros = below(17, n, groups) if kind.format == "uint4" else None
    return Codes(kind.format, codes, (scales * k**-0.5).bfloat16(), zeros)


def packed(weight: torch.Tensor, kind: Kind) -> StandIn:
    """Not quantised at all: random numbers of the weight's extents."""
    n, k = weight.shape
    return StandIn(random_codes(kind, n, k, seed=int(weight[0, 0].float().abs() * 1000)))


def multiplied(
    a: torch.Tensor,
    weight: StandIn,
    *,
    out: torch.Tensor,
    scale_a: torch.Tensor | None,
    spec: object,
) -> torch.Tensor:
    """The product, of weights that scales were multiplied into in a's type of 16 bits."""
    w = weight.codes.weight()
    x = a.float() @ (w.bfloat16() if a.dtype == torch.bfloat16 else w).float().t()
    return out.copy_(x if scale_a is None else x * scale_a[:, None])
