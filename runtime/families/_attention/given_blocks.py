"""Masks of blocks as they are given: torch's `BlockMask`, or lists like those that it has.

For each block of rows these tell how many blocks of columns have something to attend to, and which,
in two lists. Blocks of the one are masked by `mask_mod`, those of the other count as a whole.
Nothing waits for a GPU but where there is a `mask_mod`: how many blocks it is evaluated in decides
how much memory its bits take.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from warploom.arguments import require_count
from warploom.errors import ProblemError
from warploom.runtime.families._attention.block_mask import (
    Block,
    BlockMask,
    numbered,
    packed,
    version_of,
)
from warploom.runtime.tensors import shown

MaskMod = Callable[..., torch.Tensor]  # of the numbers of batch, head, row and column

_TOGETHER = 1 << 24  # scores whose mask is evaluated at a time
_converted: dict[int, tuple[weakref.ref[Any], tuple[int, ...], BlockMask]] = {}  # of torch's, by id


def block_mask(
    mask: object = None,
    *,
    kv_num_blocks: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    full_kv_num_blocks: torch.Tensor | None = None,
    full_kv_indices: torch.Tensor | None = None,
    block: Block | int = (128, 128),
    seq_q: int | None = None,
    seq_k: int | None = None,
    mask_mod: MaskMod | None = None,
) -> BlockMask:
    """Make a block mask for `warploom.attention(..., block_mask=...)`.

    Either pass a `mask`, or lists of blocks, as for flex_attention's `BlockMask.from_kv_blocks`.

    Args:
        mask: A `torch.nn.attention.flex_attention.BlockMask`, from which everything is taken.
        kv_num_blocks: int32 [batch or 1, heads or 1, row blocks]: how many blocks of keys each
            block of rows attends to. All scores of these blocks are kept, unless there is a
            `mask_mod`.
        kv_indices: int32 [batch or 1, heads or 1, row blocks, most]: which blocks these are, in any
            order.
        full_kv_num_blocks: As kv_num_blocks, of further blocks whose scores are all kept in any
            case.
        full_kv_indices: As kv_indices, of these.
        block: Rows and columns of a block, or one number for both; multiples of 64 or 128 are
            fastest.
        seq_q: Rows of the scores, if the last block is not full.
        seq_k: Columns of the scores, if the last block is not full.
        mask_mod: A function (batch, head, row, column) -> bool of tensors without dimensions. It is
            evaluated once, in the blocks of the first lists, and stored as a bit for each score.

    Returns:
        The mask. Neither the lists nor what `mask_mod` reads may change afterwards.

    Raises:
        ProblemError: For lists of other shapes, dtypes or devices.

    Waits for the GPU if there is a `mask_mod`.

    Example:
        >>> counts, blocks = torch.ones(1, 1, 2).int(), torch.tensor([[[[0, 1], [1, 0]]]]).int()
        >>> mask = warploom.block_mask(kv_num_blocks=counts, kv_indices=blocks)  # the diagonal
        >>> mask.dense().shape
        torch.Size([1, 1, 256, 256])
    """
    lists = (kv_num_blocks, kv_indices)
    if mask is not None:
        if any(one is not None for one in (*lists, full_kv_num_blocks, full_kv_indices, mask_mod)):
            raise ProblemError(
                "a mask together with lists or mask_mod",
                rule="must be one of them: a BlockMask has its own lists and mask_mod",
                fix="pass one of them",
            )
        return converted(mask)
    if not all(isinstance(one, torch.Tensor) for one in lists):
        raise ProblemError(
            "no mask, and not both of kv_num_blocks and kv_indices",
            rule="lists say how many blocks, and which",
            fix="give both, or a BlockMask of torch's flex_attention",
        )
    counts, indices = (one for one in lists if one is not None)
    sizes = check_block(block)
    for name, length in (("seq_q", seq_q), ("seq_k", seq_k)):
        if length is not None:
            require_count(name, length)
    if mask_mod is not None and not callable(mask_mod):
        raise ProblemError(
            f"mask_mod {shown(mask_mod)}",
            rule="must be a function of batch, head, row and column",
            fix="leave it out where listed blocks count as a whole",
        )
    if indices.dim() != 4:
        _check_lists("kv", counts, indices, counts, (counts.shape[-1] if counts.dim() else 0, 0))
    lengths = tuple(
        blocks * size if seq is None else seq
        for seq, blocks, size in zip((seq_q, seq_k), indices.shape[2:], sizes, strict=True)
    )
    return of_lists(
        counts,
        indices,
        full_kv_num_blocks,
        full_kv_indices,
        sizes,
        (lengths[0], lengths[1]),
        mask_mod,
    )


def converted(mask: object) -> BlockMask:
    """The mask that a call is given: one of ours, or torch's, which is kept as long as that is."""
    if isinstance(mask, BlockMask):
        return mask
    given: Any = mask
    if not is_torch_mask(mask):
        raise ProblemError(
            f"block_mask {shown(mask)} of type {type(mask).__name__}",
            rule="must be what warploom.block_mask returns, or torch's BlockMask",
            fix="warploom.block_mask(kv_num_blocks=..., kv_indices=...) makes one of lists",
        )
    if torch.compiler.is_dynamo_compiling():
        raise ProblemError(
            "torch's BlockMask within torch.compile",
            rule="its mask_mod is evaluated once, outside",
            fix="pass warploom.block_mask(mask), made before",
        )
    read = (
        given.kv_num_blocks,
        given.kv_indices,
        given.full_kv_num_blocks,
        given.full_kv_indices,
    )
    versions = tuple(version_of(one) for one in read if one is not None)
    known = _converted.get(id(given))
    if known is not None and known[0]() is given and known[1] == versions:
        return known[2]
    from torch.nn.attention.flex_attention import noop_mask

    mask_mod = None if given.mask_mod is noop_mask else given.mask_mod
    found = of_lists(*read, check_block(given.BLOCK_SIZE), tuple(given.seq_lengths), mask_mod)
    key = id(given)
    _converted[key] = (weakref.ref(given, lambda _: _converted.pop(key, None)), versions, found)
    return found


def is_torch_mask(mask: object) -> bool:
    """Whether it is a mask of torch's flex_attention, which few programs ever import."""
    kind = type(mask)
    return kind.__name__ == "BlockMask" and kind.__module__.startswith("torch.nn.attention")


def of_lists(
    kv_num_blocks: torch.Tensor,
    kv_indices: torch.Tensor,
    full_kv_num_blocks: torch.Tensor | None,
    full_kv_indices: torch.Tensor | None,
    block: Block,
    lengths: tuple[int, int],
    mask_mod: MaskMod | None,
) -> BlockMask:
    """The mask that lists are; those without a `mask_mod` all count as a whole.

    Neither order nor repetition matters; a block of both lists counts as a whole. On the GPU what
    lists name that is out of range is left out, on the CPU it is refused.
    """
    (rows, columns), (seq_q, seq_k) = block, lengths
    blocks = -(-seq_q // rows), -(-seq_k // columns)
    _check_lists("kv", kv_num_blocks, kv_indices, kv_num_blocks, blocks)
    some = _marked(kv_num_blocks, kv_indices, blocks[1])
    whole = some if mask_mod is None else torch.zeros_like(some)
    if full_kv_num_blocks is not None and full_kv_indices is not None:
        _check_lists("full_kv", full_kv_num_blocks, full_kv_indices, kv_num_blocks, blocks)
        whole = whole | _marked(full_kv_num_blocks, full_kv_indices, blocks[1])
    elif full_kv_num_blocks is not full_kv_indices:
        raise ProblemError(
            "one of full_kv_num_blocks and full_kv_indices",
            rule="a list has both: how many blocks, and which",
            fix="give both, or neither",
        )
    if mask_mod is None:
        no_bits = torch.empty(0, rows, -(-columns // 8), dtype=torch.uint8, device=whole.device)
        return BlockMask(whole.int(), no_bits, block, seq_q, seq_k)
    at = (some & ~whole).nonzero(as_tuple=True)
    bits = _evaluated(mask_mod, at, block, lengths)
    return BlockMask(numbered(whole, at), bits, block, seq_q, seq_k)


def _marked(counts: torch.Tensor, indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """Which blocks a list names: bool [batch, heads, q blocks, kv blocks]."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    inside = listed & (indices >= 0) & (indices < blocks)
    at = torch.where(inside, indices, blocks).long()
    marks = torch.zeros(*counts.shape, blocks + 1, dtype=torch.bool, device=counts.device)
    return marks.scatter_(-1, at, 1)[..., :blocks]


def _evaluated(
    mask_mod: MaskMod, at: tuple[torch.Tensor, ...], block: Block, lengths: tuple[int, int]
) -> torch.Tensor:
    """The bits of the blocks that begin `at` (batch, head, q block, kv block)."""
    # What torch's own create_mask does: indexing by the number of a score is a gather.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    (rows, columns), device = block, at[0].device
    each: Any = torch.vmap(mask_mod, (None, None, None, 0))
    each = torch.vmap(torch.vmap(each, (None, None, 0, None)), (0, 0, 0, 0))
    together = max(1, _TOGETHER // (rows * columns))
    found = [torch.empty(0, rows, -(-columns // 8), dtype=torch.uint8, device=device)]
    for first in range(0, at[0].numel(), together):
        batch, head, q_block, kv_block = (one[first : first + together] for one in at)
        row = q_block[:, None] * rows + torch.arange(rows, device=device)
        column = kv_block[:, None] * columns + torch.arange(columns, device=device)
        inside = (row < lengths[0])[:, :, None] & (column < lengths[1])[:, None]
        with TransformGetItemToIndex():
            mask = each(
                batch, head, row.clamp(max=lengths[0] - 1), column.clamp(max=lengths[1] - 1)
            )
        found.append(packed(mask.bool() & inside, 8))
    return torch.cat(found)


def _check_lists(
    name: str,
    counts: torch.Tensor,
    indices: torch.Tensor,
    like: torch.Tensor,
    blocks: tuple[int, int],
) -> None:
    """Raise ProblemError for lists of other shapes, types or devices; on the CPU, for contents."""
    fits = (
        counts.dim() == 3
        and indices.dim() == 4
        and indices.shape[:3] == counts.shape
        and counts.shape == like.shape
        and counts.shape[2] == blocks[0]
        and counts.dtype == indices.dtype == torch.int32
        and counts.device == indices.device == like.device
    )
    if not fits:
        raise ProblemError(
            f"{name}_num_blocks {list(counts.shape)} {counts.dtype} on {counts.device} with "
            f"{name}_indices {list(indices.shape)} {indices.dtype} on {indices.device}",
            rule=f"must be int32 [batch, heads, {blocks[0]}] and [batch, heads, {blocks[0]}, most] "
            f"for {blocks[0]} blocks of rows, all on one device and of one batch",
            fix="batch and heads may be 1 for lists that all of them share",
        )
    if not counts.is_cpu or not counts.numel():
        return
    if int(counts.min()) < 0 or int(counts.max()) > indices.shape[-1]:
        raise ProblemError(
            f"{name}_num_blocks from {int(counts.min())} to {int(counts.max())}",
            rule=f"must be between 0 and {indices.shape[-1]}, the last dimension of {name}_indices",
            fix="count the blocks of keys that each block of rows lists",
        )
    named = indices[torch.arange(indices.shape[-1]) < counts[..., None]]
    if named.numel() and (int(named.min()) < 0 or int(named.max()) >= blocks[1]):
        wrong = named[(named < 0) | (named >= blocks[1])][0]
        raise ProblemError(
            f"{name}_indices with {int(wrong)}",
            rule=f"must be numbers of the {blocks[1]} blocks of columns",
            fix="count blocks, not columns, from 0",
        )


def check_block(block: object) -> Block:
    """Rows and columns of a block; ProblemError for what is none."""
    given = (block, block) if isinstance(block, int) else block
    if (
        not isinstance(given, tuple | list)
        or len(given) != 2
        or any(type(one) is not int or one < 1 for one in given)
    ):
        raise ProblemError(
            f"block {shown(block)}",
            rule="must be the rows and columns of a block, ints of at least 1",
            fix="(128, 128), as torch has it, or 128",
        )
    return given[0], given[1]
