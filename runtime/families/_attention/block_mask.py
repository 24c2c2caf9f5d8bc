"""Which blocks of an attention's scores count, and a mask of bits inside of some of them."""

from __future__ import annotations

import torch

Block = tuple[int, int]

NOTHING, WHOLE, FIRST = 0, 1, 2  # of `places`: the block counts not, as a whole, by its bits


class BlockMask:
    """Which scores count: what `warploom.block_mask` makes. Its tensors must not be changed.

    places   int32 [batch or 1, heads or 1, q blocks, kv blocks]: NOTHING, WHOLE, or FIRST and the
             number of the block's bits
    bits     uint8 [masked blocks, block[0], columns of a block in eights]: 1 where a score counts
    block    rows and columns of a block
    seq_q, seq_k  rows and columns in all
    """

    def __init__(
        self, places: torch.Tensor, bits: torch.Tensor, block: Block, seq_q: int, seq_k: int
    ) -> None:
        self.places, self.bits, self.block = places, bits, block
        self.seq_q, self.seq_k = seq_q, seq_k

    def __repr__(self) -> str:
        batch, heads = self.places.shape[:2]
        rows, columns = self.block
        return f"<BlockMask {[batch, heads, self.seq_q, self.seq_k]} in blocks of {rows}x{columns}>"

    @property
    def kind(self) -> tuple[object, ...]:
        """What of it decides the plan of a call."""
        return self.places.shape, self.block, self.seq_q, self.seq_k, self.places.device

    def to(self, device: torch.device | str) -> BlockMask:
        """Return the same mask on another device.

        Args:
            device: The device.
        """
        return BlockMask(
            self.places.to(device), self.bits.to(device), self.block, self.seq_q, self.seq_k
        )

    def shown(
        self, batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        """Whether scores count, by their numbers, which broadcast; those past the end do not."""
        inside = (row < self.seq_q) & (column < self.seq_k)
        row, column = row.clamp(max=self.seq_q - 1), column.clamp(max=self.seq_k - 1)
        rows, columns = self.block
        place = self.places[batch, head, row // rows, column // columns]
        counts = place == WHOLE
        if self.bits.shape[0]:
            within = column % columns
            byte = self.bits[(place - FIRST).clamp(min=0), row % rows, within // 8]
            counts |= (place >= FIRST) & ((byte >> (within % 8).to(torch.uint8)) & 1).bool()
        return counts & inside

    def dense(
        self, batch: slice = slice(None), rows: slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        """Whether scores count: [batch or 1, heads or 1, rows, columns], of the parts asked for."""
        device, (batches, heads) = self.places.device, self.places.shape[:2]
        if batches == 1:
            batch = slice(None)

        def numbers(count: int, part: slice, trailing: int) -> torch.Tensor:
            every = torch.arange(count, device=device)[part]
            return every.reshape(-1, *[1] * trailing)

        return self.shown(
            numbers(batches, batch, 3),
            numbers(heads, slice(None), 2),
            numbers(self.seq_q, rows, 1),
            numbers(self.seq_k, columns, 0),
        )

    def part(self, batch: slice, rows: slice, columns: slice) -> BlockMask:
        """The mask of some rows and columns of some batches."""
        return of_dense(self.dense(batch, rows, columns), self.block)


def of_dense(mask: torch.Tensor, block: Block = (128, 128)) -> BlockMask:
    """The mask of blocks that bool [batch or 1, heads or 1, seq_q, seq_k] is."""
    batch, heads, seq_q, seq_k = mask.shape
    rows, columns = block
    blocks = (-(-seq_q // rows), -(-seq_k // columns))
    wide = mask.new_zeros(batch, heads, blocks[0] * rows, blocks[1] * columns)
    wide[:, :, :seq_q, :seq_k] = mask
    tiles = wide.reshape(batch, heads, blocks[0], rows, blocks[1], columns).transpose(3, 4)
    whole, some = tiles.flatten(-2).all(-1), tiles.flatten(-2).any(-1)
    at = (some & ~whole).nonzero(as_tuple=True)
    return BlockMask(numbered(whole, at), packed(tiles[at], 8), block, seq_q, seq_k)


def packed(mask: torch.Tensor, word: int) -> torch.Tensor:
    """The bools of the last dimension as bits of bytes, the first the lowest; whole words."""
    *lead, columns = mask.shape
    wide = torch.nn.functional.pad(mask, (0, -columns % word))
    bools = wide.reshape(*lead, wide.shape[-1] // 8, 8)  # -1 would be nothing's, of no blocks
    weights = 2 ** torch.arange(8, device=mask.device, dtype=torch.int32)
    return (bools * weights).sum(-1, dtype=torch.int32).to(torch.uint8)


def numbered(whole: torch.Tensor, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`places`, of blocks that count as a whole and those that have bits, in their order."""
    places = whole.to(torch.int32)
    numbers = torch.arange(FIRST, FIRST + at[0].numel(), device=whole.device, dtype=torch.int32)
    places[at] = numbers
    return places


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, as far as torch tells: not of those of inference mode."""
    return 0 if tensor.is_inference() else tensor._version
