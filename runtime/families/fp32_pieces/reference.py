"""The same pieces in plain torch, with the same bits."""

from __future__ import annotations

import torch

from warploom.generator.families.fp32_pieces.schedule import PLACE

FIRST = 2.0**64
"""At most the first of the two scales of A, by the second of which sums are multiplied last."""


def place(k: int) -> int:
    """Elements from a piece to the next in a row of q."""
    return -(-k // PLACE) * PLACE


def factors(x: torch.Tensor) -> torch.Tensor:
    """What each row of x [m, k] is multiplied by: powers of two, of finite magnitudes alone."""
    peaks = torch.where(x.isfinite(), x.abs(), 0.0).amax(1) if x.shape[1] else x.new_zeros(len(x))
    bits = peaks.view(torch.int32)
    exponent = torch.where(bits == 0, 127, (268 - (bits >> 23)).clamp(max=253))
    return (exponent << 23).to(torch.int32).view(torch.float32)


def pieces(x: torch.Tensor, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q [m, count * place] and scales [3, m] of fp32 x [m, k]; scales of bf16 pieces are ones."""
    m, k = x.shape
    factor = factors(x) if dtype == torch.float16 else x.new_ones(m)
    rest, finite = x * factor[:, None], x.isfinite()
    q = x.new_zeros(m, count, place(k), dtype=dtype)
    for index in range(count):
        piece = rest.to(dtype)
        if dtype == torch.bfloat16:  # beyond the largest number of 16 bits
            most = torch.full_like(piece, torch.finfo(dtype).max).copysign(piece)
            piece = torch.where(piece.isinf() & finite, most, piece)
        q[:, index, :k] = piece
        rest = torch.where(finite, rest - piece.float(), 0.0)
    inverse = 1 / factor
    first = inverse.clamp(max=FIRST)
    return q.flatten(1), torch.stack([first, inverse / first, inverse])
