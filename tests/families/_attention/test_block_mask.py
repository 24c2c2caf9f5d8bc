"""Masks of blocks: what lists mean, what kernels walk for them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_block_cases import EXTENTS, MASKS
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import warploom
from warploom import BlockMask, ProblemError
from warploom.runtime.families._attention import block_lists
from warploom.runtime.families._attention.block_mask import of_dense

TILES = [(128, 128), (64, 128), (96, 64)]
over_tiles = pytest.mark.parametrize("tile", TILES, ids=str)


def lists(counts: list[list[int]], indices: list[list[list[int]]], **others: Any) -> dict[str, Any]:
    """Lists of one batch by heads."""
    return {
        "kv_num_blocks": torch.tensor([counts], dtype=torch.int32),
        "kv_indices": torch.tensor([indices], dtype=torch.int32),
        **others,
    }


def drawn(block: tuple[int, int], seq_q: int = 300, seq_k: int = 421) -> BlockMask:
    """Blocks of each kind, of two heads: empty, whole, and in between."""
    random = torch.Generator().manual_seed(1)
    rows, columns = -(-seq_q // block[0]), -(-seq_k // block[1])
    kinds = torch.randint(0, 3, (1, 2, rows, columns), generator=random)
    wide = kinds.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    wide = wide[:, :, :seq_q, :seq_k]
    scores = torch.rand(wide.shape, generator=random) < 0.5
    return of_dense((wide == 1) | ((wide == 2) & scores), block)


def unpacked(words: torch.Tensor, columns: int) -> torch.Tensor:
    """The bools that words are."""
    return ((words[..., None] >> torch.arange(32)) & 1).bool().flatten(-2)[..., :columns]


@pytest.mark.parametrize("columns", [64, 60])
def test_scores_that_count_in_whole_blocks_alone_need_no_bits(columns: int) -> None:
    """Guards against a mask that fails where nothing is between empty and whole."""
    mask = torch.tensor([[True, False], [False, True]]).repeat_interleave(16, 0)
    mask = mask.repeat_interleave(32, 1)[None, None, :, :columns]
    for one, block in ((mask, (16, 32)), (mask & False, (16, 32)), (mask, (8, 4))):
        found = of_dense(one, block)
        assert not found.bits.numel() or columns % block[1]
        assert torch.equal(found.dense(), one)


BLOCKS = [(128, 128), (64, 64), (48, 80), (256, 500)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@over_tiles
def test_a_forward_pass_walks_just_the_scores_that_count(
    block: tuple[int, int], tile: tuple[int, int]
) -> None:
    mask = drawn(block)
    found, (q_tile, kv_tile) = block_lists.of_rows(mask, tile), tile
    shown = torch.zeros(2, 1024, 1024, dtype=torch.bool)
    for head, turn in torch.cartesian_prod(torch.arange(2), torch.arange(-(-300 // q_tile))):
        steps, whole, first, row = found.lists[0, head, turn].tolist()
        walked = found.listed[0, head, turn, :steps].tolist()
        assert sorted(set(walked)) == sorted(walked)
        for place, column in enumerate(walked[::-1]):  # those with masks are walked first
            part = torch.ones(q_tile, kv_tile, dtype=torch.bool)
            if place >= whole:
                part = unpacked(found.masks[first + place - whole], kv_tile)
            at = slice(column * kv_tile, (column + 1) * kv_tile)
            shown[head, row * q_tile : (row + 1) * q_tile, at] = part
    assert torch.equal(shown[:, :300, :421], mask.dense()[0])
    assert not shown[:, :300, 421:].any()  # no column past the end
    assert (found.lists[..., 0].diff() <= 0).all()  # or a long list begins when all others end


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@over_tiles
def test_a_backward_pass_walks_the_same_scores_by_columns_in_the_order_of_turns(
    block: tuple[int, int], tile: tuple[int, int]
) -> None:
    mask = drawn(block)
    found, (q_tile, kv_tile) = block_lists.of_columns(mask, tile), tile
    shown = torch.zeros(2, 1024, 1024, dtype=torch.bool)
    turns: dict[tuple[int, int], int] = {}
    for head, column in torch.cartesian_prod(torch.arange(2), torch.arange(-(-421 // kv_tile))):
        entries = found.listed[0, head, column, : int(found.lists[0, head, column])].tolist()
        assert [entry[0] for entry in entries] == sorted({entry[0] for entry in entries})
        for row, number, turn, _ in entries:
            before = turns.get((int(head), row), 0)
            assert turn == before  # or a block waits for one that never adds
            turns[int(head), row] = before + 1
            part = torch.ones(q_tile, kv_tile, dtype=torch.bool)
            if number >= 0:
                part = unpacked(found.masks[number], q_tile).mT
            at = slice(column * kv_tile, (column + 1) * kv_tile)
            shown[head, row * q_tile : (row + 1) * q_tile, at] = part
    assert torch.equal(shown[:, :300, :421], mask.dense()[0])
    assert not shown[:, :300, 421:].any()


@pytest.mark.parametrize("extents", [name for name in EXTENTS if not name.startswith("more")])
def test_masks_that_kernels_are_tried_with_are_made_and_listed_at_every_length(
    extents: str,
) -> None:
    """Else kernels are not tried with them where there is one block of rows."""
    tile = (128, 64)
    for make in MASKS.values():
        mask = make(EXTENTS[extents])
        rows, columns = torch.arange(mask.seq_q)[:, None], torch.arange(mask.seq_k)
        counts = mask.places[..., rows // mask.block[0], columns // mask.block[1]].ne(0)
        tiles = torch.nn.functional.max_pool2d(counts.float(), tile, ceil_mode=True)
        walked, *_, of_tile = block_lists.of_rows(mask, tile).lists.unbind(-1)
        assert torch.equal(walked, tiles.sum(-1).int().gather(-1, of_tile.long()))
        walked = block_lists.of_columns(mask, tile).lists
        assert torch.equal(walked, tiles.sum(-2).int())


@pytest.mark.parametrize("tile", [(128, 128), (64, 64)], ids=str)
def test_tiles_within_whole_blocks_have_no_mask_and_absent_ones_are_not_listed(
    tile: tuple[int, int],
) -> None:
    mask = warploom.block_mask(**lists([[1, 0]], [[[1, 0], [0, 0]]]))
    found = block_lists.of_rows(mask, tile)
    across, down = 128 // tile[1], 128 // tile[0]
    steps = [across] * down + [0] * down
    assert found.lists[0, 0].tolist() == [[count, count, 0, row] for row, count in enumerate(steps)]
    of_columns = block_lists.of_columns(mask, tile).lists[0, 0].tolist()
    assert of_columns == [0] * across + [down] * across


def test_lists_are_made_once_for_a_mask_and_anew_when_it_was_written_to() -> None:
    mask = drawn((128, 128))
    first = block_lists.of_rows(mask, (128, 128))
    again = BlockMask(mask.places, mask.bits, mask.block, mask.seq_q, mask.seq_k)
    assert block_lists.of_rows(again, (128, 128)) is first
    mask.places.zero_()
    assert not block_lists.of_rows(mask, (128, 128)).lists[..., 0].any()


def test_torch_s_mask_keeps_its_mask_mod_in_partial_blocks_and_is_taken_once() -> None:
    document = torch.tensor([0] * 100 + [1] * 150 + [2] * 50)

    def mask_mod(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return (q >= k) & (document[q] == document[k]) & ((h == 0) | (k % 2 == 0))

    theirs = create_block_mask(mask_mod, 1, 2, 300, 300, device="cpu", BLOCK_SIZE=64)
    ours = warploom.block_mask(theirs)
    assert torch.equal(ours.dense(), create_mask(mask_mod, 1, 2, 300, 300, device="cpu"))
    assert warploom.block_mask(theirs) is ours


def test_order_and_repetition_do_not_matter_and_whole_blocks_win() -> None:
    def nothing(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q < 0

    mask = warploom.block_mask(
        **lists([[3]], [[[2, 0, 2]]], block=16, mask_mod=nothing),
        full_kv_num_blocks=torch.tensor([[[1]]], dtype=torch.int32),
        full_kv_indices=torch.tensor([[[[2]]]], dtype=torch.int32),
    )
    assert mask.dense()[0, 0].any(0).tolist() == [False] * 32 + [True] * 16


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a number past the blocks": (lists([[1]], [[[7, 0]]]), "kv_indices with 7: must be numbers of"),
    "a number below 0": (lists([[1]], [[[-1, 0]]]), "kv_indices with -1"),
    "too many": (lists([[3]], [[[0, 1]]]), "kv_num_blocks from 3 to 3: must be between 0 and"),
    "rows that are not there": (lists([[1]], [[[0, 1]]], seq_q=300), "for 3 blocks of rows"),
    "another type": (
        {**lists([[1]], [[[0]]]), "kv_num_blocks": torch.ones(1, 1, 1)},
        "must be int32",
    ),
    "no block": (lists([[1]], [[[0]]], block=(0, 128)), "block \\(0, 128\\): must be the rows"),
    "no indices": ({"kv_num_blocks": torch.ones(1, 1, 1)}, "not both of kv_num_blocks and"),
    "half of whole ones": (
        lists([[1]], [[[0]]], full_kv_num_blocks=torch.ones(1, 1, 1, dtype=torch.int32)),
        "one of full_kv_num_blocks and full_kv_indices",
    ),
    "no mask": ({"mask": 3}, "block_mask 3 of type int: must be what warploom.block_mask returns"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_wrong_lists_are_told_by_name(refused: str) -> None:
    keywords, message = REFUSED[refused]
    with pytest.raises(ProblemError, match=message):
        warploom.block_mask(**keywords)
