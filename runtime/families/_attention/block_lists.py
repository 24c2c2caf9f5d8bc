"""The lists of tiles that kernels walk, made of a mask of blocks for the tiles of a schedule.

A tile may be a part of a block, be made of several, or begin within one: it is walked where any of
its scores may count, and has a mask of its own where not all do. Lists are made by torch on the
device, once for a mask and a schedule's tiles, and kept as long as the mask is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from warploom.errors import ProblemError
from warploom.runtime.families._attention.block_mask import (
    WHOLE,
    BlockMask,
    packed,
    version_of,
)

_WORD = 32  # bits of a mask's word
_TOGETHER = 1 << 22  # scores whose masks are made at a time: some 50 bytes each


class Lists(NamedTuple):
    """What kernels walk, as their parameters of these names say."""

    lists: torch.Tensor
    listed: torch.Tensor
    masks: torch.Tensor

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Where they lie."""
        return self.lists.data_ptr(), self.listed.data_ptr(), self.masks.data_ptr()


Key = tuple[bool, int, int]  # whether columns are walked for, and the tile
_known: Any = WeakTensorKeyDictionary()  # by `places`


def of_rows(mask: BlockMask, tile: tuple[int, int]) -> Lists:
    """For each tile of rows, the tiles of columns: those with masks, then whole ones.

    Both lie from right to left, which is the order of the walk, but masks from left to right.
    The tiles of rows that most is listed for come first, so that no long list begins last.

    lists   int32 [batch, heads, q tiles, 4]: how many, how many whole, first mask, which tile
    listed  int32 [batch, heads, q tiles, kv tiles]
    masks   int32 [masks, q tile, kv tile / 32]
    """
    return _kept(mask, (False, *tile))


def of_columns(mask: BlockMask, tile: tuple[int, int]) -> Lists:
    """For each tile of columns, the tiles of rows, in their order.

    lists   int32 [batch, heads, kv tiles]: how many
    listed  int32 [batch, heads, kv tiles, q tiles, 4]: the tile, its mask or -1, how many tiles of
            columns further left it is listed for, 0
    masks   int32 [masks, kv tile, q tile / 32]
    """
    return _kept(mask, (True, *tile))


def _kept(mask: BlockMask, key: Key) -> Lists:
    version = version_of(mask.places), version_of(mask.bits)
    known: dict[Key, tuple[object, Lists]] = _known.setdefault(mask.places, {})
    found = known.get(key)
    if found is not None and found[0] == version:
        return found[1]
    on_gpu = mask.places.is_cuda
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise ProblemError(
            f"{mask} in its first call, while a CUDA graph is captured",
            rule="the first call computes the lists of blocks that kernels read, and waits for the "
            "GPU",
            fix="call it once before the capture, which also compiles its kernels",
        )
    with torch.no_grad():
        lists = (_of_columns if key[0] else _of_rows)(mask, key[1], key[2])
    if on_gpu:
        torch.cuda.current_stream(mask.places.device).synchronize()  # any stream may read them
    known[key] = version, lists
    return lists


def _of_rows(mask: BlockMask, q_tile: int, kv_tile: int) -> Lists:
    some, whole = _tiles(mask, q_tile, kv_tile)
    numbers = torch.arange(some.shape[-1], device=some.device)
    order = torch.where(whole, 1, torch.where(some, 0, 2)) * some.shape[-1] - numbers
    masked = some & ~whole
    of_list = masked.sum(-1)
    first = of_list.flatten().cumsum(0).reshape(of_list.shape) - of_list
    counts = some.sum(-1)
    tiles = counts.argsort(dim=-1, descending=True, stable=True)
    header = [one.gather(-1, tiles) for one in (counts, whole.sum(-1), first)]
    listed = order.argsort(-1).gather(-2, tiles[..., None].expand(order.shape))
    at = masked.nonzero(as_tuple=True)
    masks = [_shown(mask, part, q_tile, kv_tile) for part in _parts(at, q_tile * kv_tile)]
    return Lists(
        torch.stack([*header, tiles], -1).int(),
        listed.int(),
        _words(masks, q_tile, kv_tile, some),
    )


def _of_columns(mask: BlockMask, q_tile: int, kv_tile: int) -> Lists:
    some, whole = _tiles(mask, q_tile, kv_tile)
    turns = some.long().cumsum(-1) - 1
    some, whole, turns = (one.transpose(-1, -2) for one in (some, whole, turns))
    numbers = torch.arange(some.shape[-1], device=some.device)
    order = (torch.where(some, 0, some.shape[-1]) + numbers).argsort(-1)
    masked = some & ~whole
    mask_numbers = masked.flatten().cumsum(0).reshape(masked.shape) - 1
    of_tile = torch.where(masked, mask_numbers, -1)
    entries = (order, of_tile.gather(-1, order), turns.gather(-1, order), torch.zeros_like(order))
    batch, head, column, row = masked.nonzero(as_tuple=True)
    masks = [
        _shown(mask, part, q_tile, kv_tile).mT
        for part in _parts((batch, head, row, column), q_tile * kv_tile)
    ]
    return Lists(
        some.sum(-1).int(), torch.stack(entries, -1).int(), _words(masks, kv_tile, q_tile, some)
    )


def _tiles(mask: BlockMask, q_tile: int, kv_tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether some blocks of a tile count, and all: [batch, heads, q tiles, kv tiles]."""
    device, places = mask.places.device, mask.places

    def reach(seq: int, tile: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.arange(0, seq, tile, device=device)
        ends = (starts + tile).clamp(max=seq)
        return starts // block, (ends - 1) // block + 1

    rows, columns = (
        reach(mask.seq_q, q_tile, mask.block[0]),
        reach(mask.seq_k, kv_tile, mask.block[1]),
    )

    def count(blocks: torch.Tensor) -> torch.Tensor:
        """How many of a tile's blocks are so: sums over all before, at the tile's corners."""
        sums = torch.nn.functional.pad(blocks.long().cumsum(-1).cumsum(-2), (1, 0, 1, 0))
        (top, bottom), (left, right) = rows, columns
        low, high = sums[..., bottom, :], sums[..., top, :]
        return low[..., right] - low[..., left] - high[..., right] + high[..., left]

    size = (rows[1] - rows[0])[:, None] * (columns[1] - columns[0])
    whole = count(places == WHOLE) == size
    if mask.seq_k % kv_tile:
        whole[..., -1] = False  # whose last columns are none
    return count(places > 0) > 0, whole


def _parts(at: tuple[torch.Tensor, ...], scores: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Some of the tiles `at` (batch, head, q tile, kv tile) at a time."""
    together = max(1, _TOGETHER // scores)
    for first in range(0, at[0].numel(), together):
        yield tuple(one[first : first + together] for one in at)


def _shown(
    mask: BlockMask, at: tuple[torch.Tensor, ...], q_tile: int, kv_tile: int
) -> torch.Tensor:
    """Which scores of tiles count: bool [tiles, q tile, kv tile]."""
    batch, head, row, column = (one[:, None, None] for one in at)
    rows = torch.arange(q_tile, device=row.device)[:, None] + row * q_tile
    columns = torch.arange(kv_tile, device=row.device) + column * kv_tile
    return mask.shown(batch, head, rows, columns)


def _words(masks: list[torch.Tensor], rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Masks as words, the first column the lowest bit; room for one where there are none."""
    words = [packed(one, _WORD).view(torch.int32) for one in masks]
    nothing = torch.zeros(1, rows, -(-columns // _WORD), dtype=torch.int32, device=like.device)
    return torch.cat(words) if words else nothing
