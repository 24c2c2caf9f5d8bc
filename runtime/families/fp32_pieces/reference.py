"""The same pieces in plain torch, with the same bits."""

from __future__ import annotations

import torch

from warploom.generator.families.fp32_pieces.schedule import PLACE, TILE

FIRST = 2.0**64
"""At most the first of the two scales of A, by the second of which sums are multiplied last."""


SPAN = 4
"""Words of what a matrix spans: see `span`."""


def place(k: int) -> int:
    """Elements from a piece to the next in a row of q."""
    return -(-k // PLACE) * PLACE


def factors(x: torch.Tensor) -> torch.Tensor:
    """What each row of x [m, k] is multiplied by: powers of two, of finite magnitudes alone."""
    peaks = torch.where(x.isfinite(), x.abs(), 0.0).amax(1) if x.shape[1] else x.new_zeros(len(x))
    bits = peaks.view(torch.int32)
    exponent = torch.where(bits == 0, 127, (268 - (bits >> 23)).clamp(max=253))
    return (exponent << 23).to(torch.int32).view(torch.float32)


def pieces(
    x: torch.Tensor, dtype: torch.dtype, count: int, *, across: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [m, count * place], scales [3, m] and span [4] of fp32 x [m, k].

    The scales of bf16 pieces are ones, and their span is zeros. `across`: as the kernel that reads
    rows across k counts.
    """
    m, k = x.shape
    factor = factors(x) if dtype == torch.float16 else x.new_ones(m)
    scaled, finite = x * factor[:, None], x.isfinite()
    rest = scaled
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
    scales = torch.stack([first, inverse / first, inverse])
    if dtype == torch.float16 and x.numel():
        return q.flatten(1), scales, span(scaled, rest, across=across)
    return q.flatten(1), scales, torch.zeros(SPAN, dtype=torch.int32, device=x.device)


def span(scaled: torch.Tensor, left: torch.Tensor, *, across: bool) -> torch.Tensor:
    """What the rows of a matrix span, int32 [4]: the most small or lost values of a row, the most
    lost values of a row, k, and a word that nobody reads.

    A value is small below 2^-7 of the power of two in the largest of its row, and lost if its
    pieces leave something of it and it is so small that they may miss more than 2^-23 of it. Rows
    that are read across k are counted as sums, over tiles of 64 columns, of the most of 64 rows,
    which are no less.

    Args:
        scaled: The rows times powers of two, which brought their largest to [2^14, 2^15).
        left: What the pieces leave of them.
    """
    m, k = scaled.shape
    sizes = scaled.abs()
    peaks = torch.where(scaled.isfinite(), sizes, 0.0).amax(1)
    levels = (torch.frexp(peaks)[1] + 119 << 23).view(torch.float32)  # 2^-7 of the power in each
    levels = torch.where(peaks > 0, levels, 0.0)
    lost = (left != 0) & (sizes < LOST)
    few = (sizes < levels[:, None]).int() + lost
    if across:
        padded = torch.nn.functional.pad(few, (0, -k % TILE, 0, -m % TILE))
        tiles = padded.view(-(-m // TILE), TILE, -(-k // TILE), TILE)
        most = tiles.sum(3).amax(1).sum(1).max()
        most_lost = torch.nn.functional.pad(lost, (0, -k % TILE))
        most_lost = most_lost.view(m, -1, TILE).sum(2).max()
    else:
        most, most_lost = few.sum(1).max(), lost.sum(1).max()
    rest = most.new_tensor([k, 0])
    return torch.cat([torch.stack([most, most_lost]), rest]).to(torch.int32)


LOST = 0.25
"""Below that, in a row whose largest value is 2^14 or more, two fp16 pieces miss up to 2^-25."""


def pieces_hold(span_a: torch.Tensor, span_b: torch.Tensor) -> bool:
    """Whether the fp16 pieces of A and B hold their values: see docs/families/fp32_pieces.md."""
    (most_a, lost_a, k, _), (most_b, lost_b, *_) = span_a.tolist(), span_b.tolist()
    return not (lost_a or lost_b) or most_a + most_b <= k
