"""Gradients by kernels that walk lists of blocks: those of the forward pass, transposed."""

from __future__ import annotations

import attention_backward_arena as arena
import attention_backward_cases as cases
import attention_block_cases as blocks
import pytest
import torch
from attention_block_cases import BACKWARD, EXTENTS, MASKS
from attention_cases import SHAPES

from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
over_kernels = pytest.mark.parametrize("kernel", BACKWARD, ids=cases.short)


@pytest.mark.parametrize("mask", MASKS)
@over_kernels
def test_gradients_come_from_the_scores_that_count(kernel: KernelSpec, mask: str) -> None:
    for index, shape in enumerate(EXTENTS.values()):
        block_mask = MASKS[mask](shape)
        made = arena.make(
            kernel, shape, turned=index % 2 == 1, dlse=index == 1, block_mask=block_mask
        )
        # Where a row attends to one column, out is v over the probability of dropout, rounded: the
        # plain expression has differences of equal numbers there, and the bound alone is for that.
        dropout = kernel.operation.dropout  # type: ignore[attr-defined]
        arena.verify(made, beside_plain=not dropout)


@over_kernels
def test_tiles_that_are_not_listed_are_not_read(kernel: KernelSpec) -> None:
    verify_unread(kernel)


def verify_unread(kernel: KernelSpec) -> None:
    """Rows and columns that no block names are NaN: 0 times NaN would be NaN, too."""
    shape = SHAPES["1000"]
    mask = blocks.lists(shape, 2.0, own=False)
    mask.places[..., 4:6, :] = 0  # rows 512 to 767
    mask.places[..., 2:4] = 0  # columns 256 to 511
    made = arena.make(kernel, shape, block_mask=mask)
    forward = made.forward
    for tensor in (forward.q.view, made.dout.view):
        tensor[:, :, 512:768] = torch.nan
    for tensor in (forward.k.view, forward.v.view):
        tensor[:, :, 256:512] = torch.nan
    dq, dk, dv = made.run()
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    assert dq.isfinite().all()
    assert not dk[:, :, 256:512].any()
    assert not dq[:, :, 512:768].any()


@pytest.mark.parametrize(
    "kernel", [one for one in BACKWARD if cases.operation(one).deterministic], ids=cases.short
)
def test_gradients_in_order_are_bit_equal(kernel: KernelSpec) -> None:
    shape = EXTENTS["more tiles than multiprocessors"]
    made = arena.make(kernel, shape, block_mask=MASKS["lists"](shape))
    first = arena.clones(made.run())
    for _ in range(20):
        found = made.run()
        assert all(torch.equal(one, other) for one, other in zip(found, first, strict=True))
