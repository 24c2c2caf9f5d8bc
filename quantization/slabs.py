"""Codes to slabs and back: the layout of generator/slabs.py, by a few operations on whole tensors.

Codes are here as they are stored, `bits` bits in a byte each. All of it runs on any device, gives
the same bytes on each, and needs little more memory than these bytes of a range of rows; callers
go through a weight by `row_ranges`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import permutations, product

import torch
from torch import Tensor

from warploom.generator.formats import WORD_BITS
from warploom.generator.slabs import BRICK_K, DEPTH, ROWS, SlabLayout
from warploom.quantization.metadata import Metadata

RANGE = 1 << 23  # codes that are converted at a time: few launches, little memory
_WARPS, _LANES, _QUADS, _HALVES = 4, 8, 4, 2

# What a row and a k are made of, outermost first; and what lies in memory up to a thread's words of
# a step, in which registers (a half of k, and the upper or the lower row) and elements follow.
_ROW_AND_K = (
    *("block", "warp", "lower", "lane"),
    *("slab", "brick", "piece", "step", "half", "quad", "element"),
)
_MEMORY = ("block", "slab", "brick", "piece", "warp", "lane", "quad", "step")
_FIELD = ("half", "lower", "element")


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
    whole = _padded(stored, blocks * ROWS, deep * DEPTH, layout.order.offset)
    codes = whole.view(blocks, _WARPS, _HALVES, _LANES, -1)
    if layout.row.bits == 4:
        codes = torch.add(codes[:, :, :1], codes[:, :, 1:], alpha=16)  # the lower row above
    memory, moves = _arrangement(layout)
    sizes = _sizes(layout, blocks, deep)
    ordered = codes.view([sizes[axis] for axis in _ROW_AND_K])
    part = slabs[..., : layout.codes_bytes]
    part.view([sizes[axis] for axis in memory]).copy_(
        ordered.permute([_ROW_AND_K.index(axis) for axis in memory])
    )
    if moves:
        words = part.view(torch.int32)
        words.copy_(_moved(words, moves))
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
    part = slabs[..., : layout.codes_bytes].contiguous()
    memory, moves = _arrangement(layout)
    if moves:
        back = {-up: mask >> up if up > 0 else mask << -up for up, mask in moves.items()}
        part = _moved(part.view(torch.int32), back).view(torch.uint8)
    sizes = _sizes(layout, blocks, deep)
    ordered = part.view([sizes[axis] for axis in memory])
    codes = ordered.permute([memory.index(axis) for axis in _ROW_AND_K])
    codes = codes.reshape(blocks, _WARPS, sizes["lower"], _LANES, -1)
    if layout.row.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), 2)
    return codes.view(blocks * ROWS, -1)[:rows, :k]


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


def _sizes(layout: SlabLayout, blocks: int, deep: int) -> dict[str, int]:
    """Return the extent of each axis, in bytes: two rows share one where codes have 4 bits."""
    return {
        "block": blocks,
        "warp": _WARPS,
        "lower": _HALVES if layout.row.bits == 8 else 1,
        "lane": _LANES,
        "slab": deep,
        "brick": DEPTH // BRICK_K,
        "piece": layout.pieces,
        "step": BRICK_K // layout.step // layout.pieces,
        "half": _HALVES,
        "quad": _QUADS,
        "element": layout.step // (_HALVES * _QUADS),
    }


@lru_cache(maxsize=64)
def _arrangement(layout: SlabLayout) -> tuple[tuple[str, ...], Mapping[int, int]]:
    """Return the axes of whole codes in memory, and how bits are moved then (see _moves).

    Of all orders of registers and elements it is that with the fewest moves: none, where the
    format's is one of them. Codes of 4 bits lie beside those 8 rows below.
    """
    able = [axes for axes in permutations(_FIELD) if layout.row.bits == 8 or axes[-1] == "lower"]
    found = [(axes, moves) for axes in able if (moves := _moves(layout, axes)) is not None]
    axes, moves = min(found, key=lambda one: len(one[1]))
    return _MEMORY + axes, moves


def _moves(layout: SlabLayout, axes: tuple[str, ...]) -> dict[int, int] | None:
    """Return which bits of words (as they lie after it) move up, by how many bits.

    Empty where none moves, None where some would have to go to another word, or words differ.
    """
    sizes = _sizes(layout, 1, 1) | {"lower": _HALVES}
    words: list[dict[int, int]] = [{} for _ in range(layout.order.words)]
    for at in product(*(range(sizes[axis]) for axis in axes)):
        index = dict(zip(axes, at, strict=True))
        field = 0
        for axis in axes:
            field = field * sizes[axis] + index[axis]
        for bit in range(layout.row.bits):
            begin = field * layout.row.bits + bit
            register = 2 * index["half"] + index["lower"]
            end = layout.order.place(register, index["element"], bit)
            if begin // WORD_BITS != end // WORD_BITS:
                return None
            masks = words[end // WORD_BITS]
            masks[end - begin] = masks.get(end - begin, 0) | 1 << end % WORD_BITS
    if any(masks != words[0] for masks in words):
        return None
    return {} if set(words[0]) == {0} else words[0]


def _moved(words: Tensor, moves: Mapping[int, int]) -> Tensor:
    """Return int32 `words` with bits moved up, or down, all of them at once."""
    moved = torch.zeros_like(words)
    for up, mask in moves.items():
        part = words << up if up > 0 else words >> -up
        moved |= part.bitwise_and_(mask - (mask >> 31 << 32))  # as int32 has it
    return moved


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
