"""Gradients where a mask is of keys: of those that it shows, and zeros of those that it hides."""

from __future__ import annotations

from typing import Any

import attention_backward_arena as arena
import attention_backward_cases as cases
import attention_key_cases as keys
import pytest
import torch
from attention_cases import MASKS, Shape
from attention_key_cases import EXTENTS, PATTERNS

from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
over_kernels = pytest.mark.parametrize("kernel", cases.KEYS, ids=cases.short)


def made(kernel: KernelSpec, name: str, shape: Shape, **keywords: Any) -> arena.Pass:
    """A pass with a mask of keys, of packed lengths if the kernel is for these."""
    mask = keys.mask(name, shape)
    if cases.operation(kernel).lengths == "fixed":
        return arena.make(kernel, shape, mask=mask, **keywords)
    rows = [shape.seq_q - 31 * i for i in range(shape.batch)]
    columns = [max(1, shape.seq_k - 61 * i) for i in range(shape.batch)]
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
    return arena.packed(kernel, rows, columns, past=5, mask=mask, **heads, **keywords)


@pytest.mark.parametrize("name", PATTERNS)
@over_kernels
def test_gradients_come_from_the_keys_that_are_shown(kernel: KernelSpec, name: str) -> None:
    for index, shape in enumerate(EXTENTS.values()):
        if cases.operation(kernel).lengths == "packed" and shape.seq_q < 31 * shape.batch:
            continue
        keywords = MASKS[cases.operation(kernel).mask]
        pass_ = made(kernel, name, shape, dlse=index == 1, **keywords[index % len(keywords)])
        # Where a row attends to one column the plain expression has differences of equal numbers.
        arena.verify(pass_, beside_plain=not cases.operation(kernel).dropout)


@over_kernels
def test_tiles_of_keys_that_are_hidden_are_not_read(kernel: KernelSpec) -> None:
    operation = cases.operation(kernel)
    if operation.lengths == "packed" or operation.bias_gradient:
        return
    shape = Shape(2, 4, 2, 300, 1021)
    for name in ("right", "left"):
        one = made(kernel, name, shape)
        first = arena.clones(one.run())
        for batch in range(shape.batch):
            shown = one.forward.keywords["mask"][batch, 0, 0].nonzero()[:, 0]
            begin, end = (int(shown[0]), int(shown[-1]) + 1) if len(shown) else (1021, 1021)
            for tensor in (one.forward.k.view, one.forward.v.view):
                tensor[batch, :, : max(0, begin - 128)] = torch.nan
                tensor[batch, :, end + 128 :] = torch.nan
        dq, dk, dv = one.run()
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])
        assert dq.isfinite().all()


@pytest.mark.parametrize("name", ["right", "left", "both ends", "of heads", "holes"])
@pytest.mark.parametrize(
    "kernel", [one for one in cases.KEYS if cases.operation(one).deterministic], ids=cases.short
)
def test_gradients_in_order_are_bit_equal(kernel: KernelSpec, name: str) -> None:
    one = made(kernel, name, EXTENTS["several tiles"])
    first = arena.clones(one.run())
    for _ in range(20):
        found = one.run()
        assert all(torch.equal(now, then) for now, then in zip(found, first, strict=True))
