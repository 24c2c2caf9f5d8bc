"""Boxes, spans and descriptors: numbers that TMA and wgmma would take silently if wrong."""

from __future__ import annotations

import pytest

from warploom.generator.elements import element
from warploom.generator.tensor_maps import (
    OperandTile,
    operand_reason,
    operand_tile,
    readable,
    widest_span,
)

BF16, E4M3 = element("bf16"), element("e4m3")


def k_major(extent: int, blocks: int = 1) -> OperandTile:
    return operand_tile(BF16, k_major=True, extent=extent, tile_k=64, blocks=blocks)


def mn_major(extent: int, blocks: int = 1) -> OperandTile:
    return operand_tile(BF16, k_major=False, extent=extent, tile_k=64, blocks=blocks)


@pytest.mark.parametrize(
    ("extent", "bits", "span"),
    [
        (256, 16, 128),
        (64, 16, 128),
        (96, 16, 64),  # boxes of 64 columns would overwrite the neighbour's
        (176, 16, 32),
        (8, 16, 16),
        (4, 16, 0),
        (96, 32, 128),
        (8, 32, 32),
        (96, 8, 32),
        (8, 8, 0),
    ],
)
def test_the_span_is_the_widest_whose_elements_divide_the_extent(
    extent: int, bits: int, span: int
) -> None:
    assert widest_span(extent, bits) == span


def test_a_k_major_tile_is_one_box_of_128_byte_rows() -> None:
    tile = k_major(128)
    assert (tile.box, tile.boxes, tile.bytes) == ((64, 128), 1, 16_384)
    assert (tile.stride_offset, tile.leading_offset, tile.layout_type) == (1024, 0, 1)
    assert tile.k_step == 32


def test_an_mn_major_tile_is_boxes_side_by_side_with_a_row_for_each_k() -> None:
    tile = mn_major(256)
    assert (tile.box, tile.boxes, tile.bytes) == ((64, 64), 4, 32_768)
    assert (tile.stride_offset, tile.leading_offset) == (1024, 64 * 128)
    assert tile.k_step == 16 * 128  # 16 rows of one box
    narrow = mn_major(176)
    assert (narrow.box, narrow.boxes, narrow.layout_type, narrow.bytes) == ((16, 64), 11, 3, 22_528)


def test_slices_of_a_multicast_cover_the_tile_exactly() -> None:
    for tile in (k_major(256, 2), k_major(96, 4), mn_major(256, 2), mn_major(16, 8)):
        assert tile.slice_rows * tile.slices == tile.rows and tile.slice_rows % 8 == 0
        assert tile.box[1] == tile.slice_rows
        assert tile.slices == tile.blocks and not tile.in_turn
        assert operand_reason("a", tile) is None


@pytest.mark.parametrize(("rows", "blocks"), [(8, 2), (88, 4), (72, 2), (48, 8)])
def test_a_tile_without_slices_of_8_rows_is_loaded_whole_by_turns(rows: int, blocks: int) -> None:
    """A slice that is not whole atoms of the swizzle would lie where wgmma does not look."""
    tile = k_major(rows, blocks)
    assert (tile.slices, tile.slice_rows, tile.in_turn) == (1, rows, True)


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (k_major(264), "a box of 264 rows: a box has at most 256"),
        (mn_major(8), "a extent 8: an MN-major tile must be a multiple of 16"),
        (
            operand_tile(E4M3, k_major=False, extent=128, tile_k=128, blocks=1),
            "a e4m3 not K-major: wgmma reads only 16-bit types MN-major",
        ),
        (
            operand_tile(BF16, k_major=True, extent=128, tile_k=32, blocks=1),
            "a tile k 32: a K-major row is 128 bytes",
        ),
    ],
)
def test_a_tile_that_cannot_be_loaded_says_why(tile: OperandTile, reason: str) -> None:
    assert operand_reason("a", tile) == reason


def test_tma_reads_in_place_only_from_16_byte_bases_and_pitches() -> None:
    assert readable(4096, 32)
    assert not readable(4096 + 8, 32)
    assert not readable(4096, 34)
