"""Which blocks of 128x128 of a matrix count, and the lists of them that kernels read.

All of it is computed on the mask's device without waiting for it: lists have room for every block.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from warploom.arguments import require_count
from warploom.errors import ProblemError
from warploom.generator.families.gemm import SPARSE_BLOCK
from warploom.runtime.tensors import shown


class Lists(NamedTuple):
    """A list of blocks for each row of blocks, longest lists first.

    lists    int32 [rows, 4]: the row, its first entry, how many entries, 0
    entries  int32 [rows * columns]: columns of blocks, ascending in a list; the rest is 0
    """

    lists: torch.Tensor
    entries: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlockPattern:
    """The blocks of 128x128 of a matrix that count: what `warploom.block_pattern` returns.

    Its tensors must not be changed.

    shape    rows and columns of blocks
    rows     lists of the columns that count in each row of blocks
    columns  lists of the rows that count in each column of blocks
    tiles    int32 [rows * columns]: numbers of blocks, row by row, of those that count; then those
             that do not, as -1 - number
    """

    shape: tuple[int, int]
    rows: Lists
    columns: Lists
    tiles: torch.Tensor

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"<BlockPattern of {rows}x{columns} blocks on {self.tiles.device}>"

    @property
    def device(self) -> torch.device:
        """Where the lists are."""
        return self.tiles.device

    def t(self) -> BlockPattern:
        """Return the pattern of the transposed matrix."""
        rows, columns = self.shape
        counts = self.tiles >= 0
        number = torch.where(counts, self.tiles, -1 - self.tiles)
        number = number % columns * rows + number // columns
        tiles = torch.where(counts, number, -1 - number)
        return BlockPattern((columns, rows), self.columns, self.rows, tiles)

    def mask(self) -> torch.Tensor:
        """Return which blocks count: bool [rows, columns]."""
        rows, columns = self.shape
        counts = self.tiles >= 0
        number = torch.where(counts, self.tiles, -1 - self.tiles).long()
        return torch.empty_like(counts).scatter_(0, number, counts).view(rows, columns)

    def dense(self, rows: int, columns: int) -> torch.Tensor:
        """Return which elements of a matrix of so many rows and columns count: bool."""
        each = self.mask().repeat_interleave(SPARSE_BLOCK, 0).repeat_interleave(SPARSE_BLOCK, 1)
        return each[:rows, :columns]


def block_pattern(
    mask: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    columns: int | None = None,
) -> BlockPattern:
    """Return which blocks of 128x128 of a matrix count, for `warploom.block_sparse_gemm`.

    Args:
        mask: bool [ceil(M / 128), ceil(K / 128)] of a matrix [M, K]: true where a block counts.
        offsets: In place of a mask, int32 or int64 [rows + 1], as crow_indices of torch's BSR
            tensors: where the entries of each row of blocks begin, and the end.
        indices: int32 or int64: the columns of the blocks that count, ascending in each row.
        columns: How many columns of blocks there are, of lists.

    Returns:
        The pattern, on the device of the mask or of the lists, for which nothing waits.

    Raises:
        ProblemError: For tensors of other types or shapes; on the CPU also for lists that are out
            of range or not ascending. On a GPU, whose numbers are not looked at, entries out of
            range are clamped.
    """
    if mask is not None:
        if offsets is not None or indices is not None or columns is not None:
            raise ProblemError(
                "a mask beside offsets, indices or columns",
                rule="must be one or the other",
                fix="leave the lists out",
            )
        _check_mask(mask)
        return _of_mask(mask)
    if not isinstance(offsets, torch.Tensor) or not isinstance(indices, torch.Tensor):
        raise ProblemError(
            "no mask, and not both of offsets and indices",
            rule="must be a mask of blocks, or lists",
            fix="pass mask, or offsets, indices and columns",
        )
    if columns is None:
        raise ProblemError(
            "lists without columns",
            rule="must tell how many columns of blocks there are",
            fix="pass columns=ceil(K / 128)",
        )
    require_count("columns", columns)
    return _of_mask(_mask_of(offsets, indices, columns))


def dropout_pattern(rows: int, columns: int, p: float, device: torch.device | str) -> BlockPattern:
    """Return a pattern in which each block is left out with probability p.

    It is drawn on the device by torch's generator there, so that checkpoints which restore its
    state draw the same again, and each replay of a captured graph draws another.
    """
    return _of_mask(torch.rand(rows, columns, device=device) >= p)


def _check_mask(mask: object) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
        kind = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, torch.Tensor) else shown(mask)
        raise ProblemError(
            f"mask {kind}",
            rule="must be a bool tensor [rows of blocks, columns of blocks]",
            fix="use mask != 0, of one element for each block of 128x128",
        )
    if mask.numel() == 0:
        raise ProblemError(
            f"mask {list(mask.shape)}", rule="must have a block", fix="leave out empty matrices"
        )


def _mask_of(offsets: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """The mask of lists; ProblemError for what is seen to be wrong with them."""
    for name, one in (("offsets", offsets), ("indices", indices)):
        if one.dtype not in (torch.int32, torch.int64) or one.dim() != 1:
            raise ProblemError(
                f"{name} {list(one.shape)} {one.dtype}",
                rule="must be int32 or int64, of one dimension",
                fix=f"use {name}.int().flatten()",
            )
    if offsets.numel() < 2 or columns < 1 or offsets.device != indices.device:
        raise ProblemError(
            f"offsets {list(offsets.shape)} on {offsets.device}, indices on {indices.device}, "
            f"columns {columns}",
            rule="must have a row of blocks and a column, and be on one device",
            fix="pass rows + 1 offsets, and move the lists to one device",
        )
    if offsets.device.type == "cpu":
        _check_lists(offsets, indices, columns)
    rows = offsets.numel() - 1
    place = torch.arange(indices.numel(), device=indices.device)
    row = torch.bucketize(place, offsets.long(), right=True) - 1  # -1 and rows: in no list
    inside = (row >= 0) & (row < rows)
    number = row.clamp(0, rows - 1) * columns + indices.long().clamp(0, columns - 1)
    mask = torch.zeros(rows * columns + 1, dtype=torch.bool, device=indices.device)
    mask[torch.where(inside, number, rows * columns)] = True  # the last is that of no list
    return mask[:-1].view(rows, columns)


def _check_lists(offsets: torch.Tensor, indices: torch.Tensor, columns: int) -> None:
    ends = offsets.tolist()
    if ends[0] < 0 or ends[-1] > indices.numel() or ends != sorted(ends):
        raise ProblemError(
            f"offsets {shown(ends)} of {indices.numel()} indices",
            rule="must ascend, from 0 or more to at most as many as there are indices",
            fix="use crow_indices() of a torch BSR tensor with blocks of 128x128",
        )
    entries = indices.tolist()
    for row, (first, end) in enumerate(itertools.pairwise(ends)):
        listed = entries[first:end]
        if listed and not 0 <= min(listed) <= max(listed) < columns:
            raise ProblemError(
                f"indices {shown(listed)} of row {row}",
                rule=f"must be columns of blocks, of which there are {columns}",
                fix="number blocks of 128 columns, not columns",
            )
        if any(one >= following for one, following in itertools.pairwise(listed)):
            raise ProblemError(
                f"indices {shown(listed)} of row {row}",
                rule="must ascend: each block counts once",
                fix="sort the indices of each row",
            )


def _of_mask(mask: torch.Tensor) -> BlockPattern:
    rows, columns = mask.shape
    if rows * columns >= 2**31:
        raise ProblemError(
            f"{rows}x{columns} blocks",
            rule="must be fewer than 2^31, which kernels count them by",
            fix="divide the matrix",
        )
    with torch.no_grad():
        flat = mask.reshape(-1)
        counting = (~flat).sort(stable=True)  # blocks that count come first, in their order
        number = counting.indices.int()
        tiles = torch.where(counting.values, -1 - number, number)
        across = mask.t()
        down = (~across).reshape(-1).sort(stable=True).indices.int()
        return BlockPattern((rows, columns), _lists(mask, number), _lists(across, down), tiles)


def _lists(mask: torch.Tensor, order: torch.Tensor) -> Lists:
    """The lists of rows; `order` has the numbers of the blocks that count first."""
    counts = mask.sum(1, dtype=torch.int32)
    row = counts.argsort(descending=True, stable=True)
    first = counts.cumsum(0, dtype=torch.int32) - counts
    zero = torch.zeros_like(counts)
    lists = torch.stack((row.int(), first[row], counts[row], zero), 1)
    return Lists(lists, order % mask.shape[1])


def masks_of(lists: torch.Tensor, entries: torch.Tensor, columns: int) -> torch.Tensor:
    """Which blocks lists on the CPU have, for the reference: bool [rows, columns].

    Raises ProblemError for lists that kernels would clamp, or compute a row of twice.
    """
    mask = torch.zeros(lists.shape[0], columns, dtype=torch.bool)
    rows = sorted(lists[:, 0].tolist())
    if rows != list(range(len(rows))):
        raise ProblemError(
            f"lists of rows {shown(rows)}",
            rule="must be one for each row of blocks",
            fix="take the lists of warploom.block_pattern",
        )
    for row, first, count, _ in lists.tolist():
        own = entries[max(first, 0) : max(first, 0) + max(count, 0)].tolist()
        if first < 0 or count < 0 or len(own) < count or count > columns:
            raise ProblemError(
                f"a list of {count} entries from {first} on, of {entries.numel()}",
                rule=f"must lie within the entries, and have at most {columns}",
                fix="take the lists of warploom.block_pattern",
            )
        ascending = all(one < following for one, following in itertools.pairwise(own))
        if own and not (ascending and own[0] >= 0 and own[-1] < columns):
            raise ProblemError(
                f"a list of blocks {shown(own)}",
                rule=f"must ascend, and be less than {columns}",
                fix="take the lists of warploom.block_pattern",
            )
        mask[row, own] = True
    return mask
