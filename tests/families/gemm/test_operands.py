"""TMA is never pointed at what it cannot read, and nothing is copied that it can."""

from __future__ import annotations

import pytest
import torch

from warploom.runtime.counters import counters
from warploom.runtime.families._product.operands import Placement, padded_copy, place
from warploom.runtime.operands import extent_bytes, overlap

EITHER = ("row", "col")


def matrix(rows: int, columns: int, pitch: int, offset: int = 0) -> torch.Tensor:
    """A row-major bf16 view with `pitch` elements between rows, `offset` into its buffer."""
    room = torch.zeros(rows * pitch + columns + offset, dtype=torch.bfloat16)
    return room.as_strided((rows, columns), (pitch, 1), offset)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (matrix(5, 24, 24), Placement("row", 24)),
        (matrix(5, 23, 24), Placement("row", 24)),
        (matrix(5, 24, 40, offset=8), Placement("row", 40)),
        (matrix(5, 24, 24).mT, Placement("col", 24)),
        (matrix(1, 23, 23), Placement("row", 24)),  # one row: any pitch will do
        (matrix(23, 1, 1), Placement("col", 24)),  # one column is one row of the other layout
        (matrix(23, 1, 8), Placement("row", 8)),
        (matrix(1, 1, 1), Placement("row", 8)),
        (matrix(0, 24, 24), Placement("row", 24)),
        (matrix(5, 0, 24), Placement("row", 5)),
    ],
    ids=lambda value: f"{list(value.shape)}" if isinstance(value, torch.Tensor) else value.layout,
)
def test_a_matrix_that_tma_can_read_is_read_in_place(
    view: torch.Tensor, expected: Placement
) -> None:
    assert place(view, EITHER) == expected


@pytest.mark.parametrize(
    "view",
    [
        matrix(5, 23, 23),  # 46 bytes from row to row
        matrix(5, 24, 24, offset=4),  # 8 bytes past a multiple of 16
        matrix(1, 24, 24).expand(5, 24),  # rows that are one row
        matrix(10, 48, 48)[::1, ::2],  # no contiguous dimension
        matrix(5, 24, 16),  # rows that overlap
    ],
    ids=["pitch", "base", "expanded", "strided", "overlapping"],
)
def test_a_matrix_that_tma_cannot_read_is_not_read_in_place(view: torch.Tensor) -> None:
    assert place(view, EITHER) is None


def test_only_the_layouts_that_are_allowed_are_found() -> None:
    assert place(matrix(5, 24, 24), ("col",)) is None
    assert place(matrix(5, 24, 24).mT, ("row",)) is None


@pytest.mark.parametrize("layout", EITHER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_copy_is_equal_readable_and_counted(layout: str, dtype: torch.dtype) -> None:
    source = torch.randint(-8, 8, (7, 13)).to(dtype)
    before = counters.copies
    copy = padded_copy(source, layout)
    assert counters.copies == before + 1
    assert torch.equal(copy.float(), source.float())
    placed = place(copy, (layout,))
    assert placed is not None
    assert placed.pitch * copy.element_size() % 16 == 0


def test_the_extent_of_a_view_ends_at_its_last_element() -> None:
    view = matrix(5, 23, 24, offset=8)
    begin, end = extent_bytes(view)
    assert begin == view.data_ptr()
    assert end - begin == 2 * (4 * 24 + 23)
    begin, end = extent_bytes(view[:0])
    assert begin == end


def test_disjoint_columns_of_one_buffer_do_not_overlap() -> None:
    buffer = torch.zeros(6, 20)
    left, right, middle = buffer[:, :8], buffer[:, 8:], buffer[2:4, 5:9]
    assert not overlap(left, right)
    assert not overlap(right, left)
    assert overlap(left, middle)
    assert overlap(middle, right)
    assert overlap(buffer[:, 2:10], buffer[1:, :3])
    assert overlap(left, buffer.flatten()[7:9])
    assert overlap(buffer[:3], buffer[2:])
    assert not overlap(buffer[:3], buffer[3:])
    batches = torch.zeros(3, 6, 20)
    assert not overlap(batches[..., :8], batches[..., 8:])
    assert not overlap(batches[..., :8], batches.flatten(0, 1)[:, 8:])
    assert overlap(batches[..., :9], batches[..., 8:])
    assert overlap(batches[:, :2, :8], batches[..., 8:])  # rows that no one pitch leads through
