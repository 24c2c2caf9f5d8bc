"""The same function in plain torch: kernels have the same bits.

Each product and each sum of a rotation is rounded to fp32, as torch's own operations are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.runtime.elements import LARGEST

LEAST = 2.0**-100  # that a row's largest number counts as: its scale can be divided by


@dataclass(frozen=True)
class Places:
    """Which sequence each new token is of, and which row of it: all int64 [tokens].

    inside   whether it is of any; else the others mean nothing
    """

    sequence: torch.Tensor
    index: torch.Tensor
    inside: torch.Tensor

    def positions(self, lengths: torch.Tensor) -> torch.Tensor:
        """Where the tokens are in their sequences."""
        return lengths.long()[self.sequence] + self.index


def fixed(batch: int, seq: int, device: torch.device) -> Places:
    """The places of as many tokens of every sequence."""
    sequence = torch.arange(batch, device=device).repeat_interleave(seq)
    index = torch.arange(seq, device=device).repeat(batch)
    return Places(sequence, index, torch.ones_like(index, dtype=torch.bool))


def packed(cu_seqlens: torch.Tensor, total: int) -> Places:
    """The places of tokens of sequences that follow each other."""
    token = torch.arange(total, device=cu_seqlens.device)
    starts = cu_seqlens.long()
    sequence = torch.searchsorted(starts[1:-1].contiguous(), token, right=True)
    index = token - starts[sequence]
    return Places(sequence, index, (index >= 0) & (token < starts[sequence + 1]))


def turned(
    rows: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Rows [tokens, heads, dim] in fp32, the first numbers of each turned by its position."""
    found = rows.float()
    rotary = 2 * cos.shape[1]
    at = positions.clamp(0, cos.shape[0] - 1)
    c, s = (table.float()[at][:, None] for table in (cos, sin))
    whole = found[..., :rotary].contiguous()
    half = rotary // 2
    pairs = whole.view(*whole.shape[:-1], *((half, 2) if interleaved else (2, half)))
    x, y = pairs.unbind(-1 if interleaved else -2)
    both = torch.stack((x * c - y * s, y * c + x * s), -1 if interleaved else -2)
    return torch.cat((both.flatten(-2), found[..., rotary:]), -1)


def row_scales(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of each row [.., dim]: its largest number over the type's largest. NaN is none."""
    largest = rows.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
    return largest.clamp(LEAST, torch.finfo(torch.float32).max) / LARGEST[dtype]


def coded(rows: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows in fp32 as a cache has them: over scales [.., 1], rounded to nearest, saturated."""
    found = rows if scales is None else rows * (1 / scales)
    if dtype == torch.float8_e4m3fn:
        return found.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    if dtype == torch.int8:
        return found.nan_to_num(nan=0.0).round().clamp(-128, 127).to(dtype)
    return found.to(dtype)


def write(
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    rows: torch.Tensor,
    places: Places,
    positions: torch.Tensor,
    page_table: torch.Tensor | None,
) -> None:
    """Write rows [tokens, kv_heads, dim] in fp32 into a cache, those that have a place in it.

    scale   fp32, of no or one dimension: given; of three: of each row, and written
    """
    pages, _, page, _ = cache.shape
    columns = 1 if page_table is None else page_table.shape[1]
    length = positions - places.index
    kept = places.inside & (length >= 0) & (positions < columns * page)
    rows, sequence, positions = rows[kept], places.sequence[kept], positions[kept]
    number = sequence
    if page_table is not None:
        number = page_table.long()[sequence, positions // page]
        known = (number >= 0) & (number < pages)
        rows, number, positions = rows[known], number[known], positions[known]
    at = positions % page
    scales = scale
    if scale is not None and scale.dim() == 3:
        scales = row_scales(rows, cache.dtype)
        scale[number, :, at] = scales
        scales = scales[..., None]
    elif scale is not None and scale.numel() > 1:
        scales = scale[:, None]
    found = coded(rows, cache.dtype, scales)
    if cache.dtype.itemsize == 1:  # which torch does not index as what it is
        cache, found = cache.view(torch.uint8), found.view(torch.uint8)
    cache[number, :, at] = found
