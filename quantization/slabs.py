"""Codes to slabs and back: the layout of generator/slabs.py, by a few operations on whole tensors.

Codes are here as they are stored, `bits` bits in a byte each. All of it runs on any device, gives
the same bytes on each, and needs little more memory than these bytes of a range of rows; callers
go through a weight by `row_ranges`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from warploom.generator.formats import elements_of
from warploom.generator.slabs import BRICK_K, DEPTH, ROWS, SlabLayout
from warploom.quantization.metadata import Metadata

RANGE = 1 << 22  # codes that are converted at a time: few launches, little memory
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
    fields = _by_thread(codes, layout)
    places = _bytes_of_threads(slabs, layout)
    for byte, held in enumerate(_fields_of_bytes(layout)):
        low, *high = (_field(fields, *field) for field in held)
        places[..., byte] = low | (high[0] << 4) if high else low
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
    codes = slabs.new_empty(blocks * ROWS, deep * DEPTH)
    fields = _by_thread(codes, layout)
    places = _bytes_of_threads(slabs, layout)
    for byte, held in enumerate(_fields_of_bytes(layout)):
        if len(held) == 1:
            _field(fields, *held[0]).copy_(places[..., byte])
        else:
            _field(fields, *held[0]).copy_(places[..., byte] & 15)
            _field(fields, *held[1]).copy_(places[..., byte] >> 4)
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


def _fields_of_bytes(layout: SlabLayout) -> list[tuple[tuple[int, int], ...]]:
    """Which (register, element) each byte of a thread's step holds, low bits first."""
    order = layout.row.orders[layout.step]
    each = 8 // layout.row.bits
    return [order[i : i + each] for i in range(0, len(order), each)]


def _by_thread(codes: Tensor, layout: SlabLayout) -> Tensor:
    """See codes as [block, slab, brick, piece, warp, lane, quad, step, k half, row half, element].

    Thread 32 warp + 4 lane + quad holds them; a register is a half of k and one of the rows.
    """
    width = elements_of(layout.step)
    steps = BRICK_K // layout.step // layout.pieces
    rows = (codes.shape[0] // ROWS, _WARPS, _HALVES, _LANES)
    bricks = (codes.shape[1] // DEPTH, DEPTH // BRICK_K)
    seen = codes.view(*rows, *bricks, layout.pieces, steps, _HALVES, _QUADS, width)
    # 0 block, 1 warp, 2 row half, 3 lane; 4 slab, 5 brick, 6 piece, 7 step, 8 k half, 9 quad, 10 e
    return seen.permute(0, 4, 5, 6, 1, 3, 9, 7, 8, 2, 10)


def _field(fields: Tensor, register: int, element: int) -> Tensor:
    return fields[..., register // 2, register % 2, element]


def _bytes_of_threads(slabs: Tensor, layout: SlabLayout) -> Tensor:
    """See slabs as [block, slab, brick, piece, warp, lane, quad, step, byte], in memory's order."""
    steps = BRICK_K // layout.step // layout.pieces
    threads = (_WARPS, _LANES, _QUADS)
    step = layout.row.words(layout.step) * 4
    shape = (*slabs.shape[:2], DEPTH // BRICK_K, layout.pieces, *threads, steps, step)
    return slabs[..., : layout.codes_bytes].view(shape)


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
