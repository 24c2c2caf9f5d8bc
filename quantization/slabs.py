"""Codes to slabs and back: the layout of generator/slabs.py, by a few operations on whole tensors.

Codes are here as they are stored, `bits` bits in a byte each. All of it runs on any device, gives
the same bytes on each, and needs little more memory than these bytes of a range of rows; callers
go through a weight by `row_ranges`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from warploom.generator.formats import REGISTERS, elements_of
from warploom.generator.slabs import BRICK_K, DEPTH, ROWS, SlabLayout
from warploom.quantization.metadata import Metadata

RANGE = 1 << 23  # codes that are converted at a time: few launches, little memory
_WARPS, _LANES, _QUADS, _HALVES = 4, 8, 4, 2


def row_ranges(metadata: Metadata) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of ranges of rows; each begins a row block."""
    rows = max(1, RANGE // (metadata.slabs_of_k * DEPTH * ROWS)) * ROWS
    for first in range(0, metadata.n, rows):
        yield first, min(first + rows, metadata.n)


def of_rows(data: Tensor, first: int, end: int) -> Tensor:
    """Return the slabs of rows `first` to `end`, of one of `row_ranges`."""
    return data[first // ROWS : -(-end // ROWS)]


def write(
    slabs: Tensor, layout: SlabLayout, stored: Tensor, scales: Tensor, zeros: Tensor | None
) -> None:
    """Fill `slabs` [blocks, slabs of k, bytes] with a range of rows.

    `stored` is uint8 [rows, K]; `scales` [rows, groups] and `zeros`, uint8 likewise, are not looked
    at where they are per channel.
    """
    blocks, deep = slabs.shape[:2]
    codes = _padded(stored, blocks * ROWS, deep * DEPTH, layout.row.offset)
    whole = codes.view(blocks, ROWS, deep, DEPTH).transpose(1, 2).reshape(blocks * deep, -1)
    order = _order(layout, slabs.device)
    if layout.row.bits == 4:
        packed = _gathered(whole, order[::2]) | (_gathered(whole, order[1::2]) << 4)
    else:
        packed = _gathered(whole, order)
    slabs[..., : layout.codes_bytes] = packed.view(blocks, deep, -1)
    if layout.group is not None:
        begin, end = layout.codes_bytes, layout.codes_bytes + layout.scales_bytes
        # torch fills few types of 8 bits, so e8m0's one is given by its bits.
        one = 127 if layout.scale == "e8m0" else 1
        values = scales.view(torch.uint8) if layout.scale == "e8m0" else scales
        slabs[..., begin:end] = _by_position(values, blocks, layout, one)
        if zeros is not None:
            slabs[..., end:] = _by_position(zeros, blocks, layout, 0)


def read(slabs: Tensor, layout: SlabLayout, rows: int, k: int) -> Tensor:
    """Return the stored codes [rows, k] that `write` was given."""
    blocks, deep = slabs.shape[:2]
    fields = slabs[..., : layout.codes_bytes].reshape(blocks * deep, -1)
    if layout.row.bits == 4:
        fields = torch.stack((fields & 15, fields >> 4), -1).flatten(1)
    whole = _gathered(fields, _order(layout, slabs.device).argsort())
    codes = whole.view(blocks, deep, ROWS, DEPTH).transpose(1, 2).reshape(blocks * ROWS, -1)
    return codes[:rows, :k]


def read_scales(
    slabs: Tensor, layout: SlabLayout, rows: int, groups: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the scales [rows, groups], of type `dtype`, and the zero points that slabs have."""
    begin, end = layout.codes_bytes, layout.codes_bytes + layout.scales_bytes
    scales = _by_row(slabs[..., begin:end], layout, dtype)[:rows, :groups]
    if not layout.row.has_zeros:
        return scales, None
    return scales, _by_row(slabs[..., end:], layout, torch.uint8)[:rows, :groups]


def _padded(values: Tensor, rows: int, columns: int, padding: float) -> Tensor:
    if values.shape == (rows, columns):
        return values.contiguous()
    padded = torch.full((rows, columns), padding, dtype=values.dtype, device=values.device)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded


# ---- Codes ---------------------------------------------------------------------------------------


def _order(layout: SlabLayout, device: torch.device) -> Tensor:
    """Return which of a slab's 64 x 128 codes each field of its bricks holds, in memory's order."""
    width = elements_of(layout.step)
    steps = BRICK_K // layout.step // layout.pieces
    depth = (DEPTH // BRICK_K, layout.pieces, steps, _HALVES, _QUADS, width)
    codes = torch.arange(ROWS * DEPTH, device=device).view(_WARPS, _HALVES, _LANES, *depth)
    # From 0 warp, 1 row half, 2 lane; 3 brick, 4 piece, 5 step, 6 k half, 7 quad, 8 element to what
    # lies in memory: a thread is a warp, lane and quad, a register a half of k and one of the rows.
    fields = codes.permute(3, 4, 0, 2, 7, 5, 6, 1, 8).reshape(-1, REGISTERS * width)
    order = [register * width + element for register, element in layout.row.orders[layout.step]]
    return fields[:, order].flatten()


def _gathered(values: Tensor, order: Tensor) -> Tensor:
    """Take the values of each slab in that order."""
    return values.gather(1, order.expand(values.shape[0], -1))


# ---- Scales and zero points ----------------------------------------------------------------------


def _by_position(values: Tensor, blocks: int, layout: SlabLayout, padding: float) -> Tensor:
    """Values [rows, groups] as bytes [blocks, slabs, bytes]: rows r and r + 8 side by side."""
    deep = -(-values.shape[1] // layout.groups)
    whole = _padded(values, blocks * ROWS, deep * layout.groups, padding)
    seen = whole.view(blocks, _WARPS, _HALVES, _LANES, deep, layout.groups)
    return seen.permute(0, 4, 5, 1, 3, 2).contiguous().view(torch.uint8).reshape(blocks, deep, -1)


def _by_row(slabs: Tensor, layout: SlabLayout, dtype: torch.dtype) -> Tensor:
    """Return the inverse of `_by_position`, with padding."""
    values = slabs.contiguous().view(dtype)
    seen = values.view(*values.shape[:2], layout.groups, _WARPS, _LANES, _HALVES)
    return seen.permute(0, 3, 5, 4, 1, 2).reshape(values.shape[0] * ROWS, -1)
