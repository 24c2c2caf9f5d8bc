"""Masks of the blocks of 128x128 of a matrix that count: drawn, or of the lists of a BSR tensor."""

from __future__ import annotations

from itertools import pairwise

import torch

from warploom.arguments import require_count
from warploom.errors import ProblemError
from warploom.generator.families.gemm import SPARSE_BLOCK, Sparse
from warploom.runtime.families.gemm.block_scales import blocks_of
from warploom.runtime.tensors import shown


def size_of(sparse: Sparse, m: int, n: int, k: int) -> tuple[int, int]:
    """Return the rows and columns of the sparse matrix of a GEMM."""
    return {"a": (m, k), "b": (k, n)}.get(sparse, (m, n))


def dropout_mask(rows: int, columns: int, p: float, device: torch.device) -> torch.Tensor:
    """Return a mask of a matrix [rows, columns], each block left out with probability p.

    It is drawn on the device by torch's generator there, so that checkpoints which restore its
    state draw the same again, and each replay of a captured graph draws another.
    """
    return torch.rand(blocks_of(rows), blocks_of(columns), device=device) >= p


def expanded(mask: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return which elements of a matrix of so many rows and columns count: bool."""
    each = mask.repeat_interleave(SPARSE_BLOCK, 0).repeat_interleave(SPARSE_BLOCK, 1)
    return each[:rows, :columns]


def csr_block_mask(
    crow_indices: torch.Tensor, col_indices: torch.Tensor, columns: int
) -> torch.Tensor:
    """Return the mask of blocks that `warploom.block_sparse_gemm` takes, of the lists of a matrix.

    Args:
        crow_indices: int32 or int64 [rows of blocks + 1]: where the list of each row of blocks
            begins, and the end, as of torch's BSR tensors with blocks of 128x128.
        col_indices: int32 or int64: the columns of blocks that count, ascending in each list.
        columns: How many columns of blocks there are.

    Returns:
        bool [rows of blocks, columns], on the device of the lists, for which nothing waits.

    Raises:
        ProblemError: For lists of other types or shapes; on the CPU also for those that are out of
            range or not ascending. On a GPU, whose numbers are not looked at, columns are clamped.

    Example:
        >>> ends, columns = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
        >>> warploom.functional.csr_block_mask(ends, columns, 2)
        tensor([[ True, False],
                [False,  True]])
    """
    for name, one in (("crow_indices", crow_indices), ("col_indices", col_indices)):
        is_tensor = isinstance(one, torch.Tensor)
        if not is_tensor or one.dtype not in (torch.int32, torch.int64) or one.dim() != 1:
            raise ProblemError(
                f"{name} {f'{list(one.shape)} {one.dtype}' if is_tensor else shown(one)}",
                rule="must be an int32 or int64 tensor of one dimension",
                fix="use crow_indices() and col_indices() of a torch BSR tensor",
            )
    require_count("columns", columns)
    rows = crow_indices.numel() - 1
    if rows < 1 or columns < 1 or crow_indices.device != col_indices.device:
        raise ProblemError(
            f"crow_indices {list(crow_indices.shape)} on {crow_indices.device}, col_indices on "
            f"{col_indices.device}, columns {columns}",
            rule="must have a row of blocks and a column, and be on one device",
            fix="pass an offset more than there are rows, and move both to one device",
        )
    if crow_indices.device.type == "cpu":
        _check(crow_indices.tolist(), col_indices.tolist(), columns)
    place = torch.arange(col_indices.numel(), device=col_indices.device)
    row = torch.bucketize(place, crow_indices.long(), right=True) - 1  # -1 and rows: in no list
    inside = (row >= 0) & (row < rows)
    number = row.clamp(0, rows - 1) * columns + col_indices.long().clamp(0, columns - 1)
    mask = torch.zeros(rows * columns + 1, dtype=torch.bool, device=col_indices.device)
    mask[torch.where(inside, number, rows * columns)] = True  # the last is that of no list
    return mask[:-1].view(rows, columns)


def _check(offsets: list[int], indices: list[int], columns: int) -> None:
    if offsets[0] < 0 or offsets[-1] > len(indices) or offsets != sorted(offsets):
        raise ProblemError(
            f"crow_indices {shown(offsets)} of {len(indices)} col_indices",
            rule="must ascend, from 0 or more to at most as many as there are col_indices",
            fix="use crow_indices() of a torch BSR tensor with blocks of 128x128",
        )
    for row, (first, end) in enumerate(pairwise(offsets)):
        listed = indices[first:end]
        if listed and not 0 <= min(listed) <= max(listed) < columns:
            raise ProblemError(
                f"col_indices {shown(listed)} of row {row}",
                rule=f"must be columns of blocks, of which there are {columns}",
                fix="number blocks of 128 columns, not columns",
            )
        if any(one >= following for one, following in pairwise(listed)):
            raise ProblemError(
                f"col_indices {shown(listed)} of row {row}",
                rule="must ascend: each block counts once",
                fix="sort the indices of each row",
            )
