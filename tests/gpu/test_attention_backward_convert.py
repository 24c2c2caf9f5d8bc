"""Kernels whose blocks write dq: the last of a kv head finds all sums, and every row is written."""

from __future__ import annotations

from dataclasses import replace

import attention_backward_arena as arena
import attention_backward_cases as cases
import pytest
import torch
from attention_arena import assert_within
from attention_backward_cases import operation, short
from attention_cases import MASKS, Shape

from warploom.generator.specification import KernelSpec
from warploom.runtime import attention_backward_reference as reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_backward_built")]
# Fewer query heads of a kv head than blocks of a cluster, and more; rows and blocks that have
# nothing to do where rows are bounded.
SHAPES = [
    *(Shape(2, 4, 2, 257, 193), Shape(3, 4, 2, 65, 1021), Shape(1, 3, 3, 1000, 63)),
    *(Shape(2, 2, 2, 700, 1), Shape(1, 8, 1, 100, 700)),
]
# Of rows and of columns: sequences without the one or the other, too.
LENGTHS = [
    ([65, 1, 128, 63, 200], [5, 300, 127, 64, 1]),
    ([0, 65, 0, 7, 0, 130], [3, 0, 0, 130, 9, 0]),
    ([1000], [1000]),
]


@pytest.mark.parametrize("kernel", cases.CONVERTS, ids=short)
def test_blocks_write_the_dq_of_every_row(kernel: KernelSpec) -> None:
    if operation(kernel).lengths == "packed":
        for keywords in MASKS[operation(kernel).mask]:
            for lengths in LENGTHS:
                heads = {"heads": 6, "kv_heads": 2}
                arena.verify(arena.packed(kernel, *lengths, past=205, **heads, **keywords))
        return
    for shape in SHAPES:
        for keywords in MASKS[operation(kernel).mask]:
            arena.verify(arena.make(kernel, shape, **keywords))
    dim = operation(kernel).dim - 24
    arena.verify(arena.make(kernel, SHAPES[0], dim=dim, turned=True))


@pytest.mark.parametrize(
    "kernel", [one for one in cases.CONVERTS if operation(one).deterministic], ids=short
)
def test_blocks_write_the_bits_that_a_kernel_of_its_own_does(kernel: KernelSpec) -> None:
    other = replace(kernel, schedule=replace(kernel.schedule, convert="kernel"))  # type: ignore[type-var, call-arg]
    keywords = MASKS[operation(kernel).mask][0]
    if operation(kernel).lengths == "packed":
        made = arena.packed(kernel, *LENGTHS[1], past=205, **keywords)
    else:
        made = arena.make(kernel, Shape(1, 6, 2, 131, 2053), **keywords)
    found = arena.clones(made.run())
    assert all(map(torch.equal, arena.with_kernel(made, other).run(), found))


@pytest.mark.parametrize("kernel", cases.CONVERTS, ids=short)
def test_the_last_block_misses_no_addition_in_200_runs_beside_another_kernel(
    kernel: KernelSpec,
) -> None:
    keywords = MASKS[operation(kernel).mask][0]
    if operation(kernel).lengths == "packed":
        made = arena.packed(kernel, [131, 1, 70], [1030, 5, 700], **keywords)
    else:
        made = arena.make(kernel, Shape(5, 33, 11, 131, 773), **keywords)
    exact, bound = (made.reference(f)[0] for f in (reference.exact, reference.bound))
    noise = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    beside = torch.cuda.Stream()
    for _ in range(200):
        with torch.cuda.stream(beside):
            torch.mm(noise, noise)
        made.gradients[0].room.fill_(-1)
        assert_within("dq", made.run()[0], exact, bound)
        assert made.gradients[0].untouched_outside()
