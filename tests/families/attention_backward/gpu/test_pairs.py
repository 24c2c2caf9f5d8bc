"""Blocks that share the rows of a kv tile against float64: dims, masks, lengths, order, repeats."""

from __future__ import annotations

import attention_backward_arena as arena
import attention_backward_cases as cases
import pytest
import torch
from attention_backward_cases import LENGTHS, SIMPLE, operation, short
from attention_cases import MASKS, SHAPES, Shape

from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
FIXED = [kernel for kernel in cases.PAIRS if operation(kernel).lengths == "fixed"]
PACKED = [kernel for kernel in cases.PAIRS if operation(kernel).lengths == "packed"]
# A last kv tile of which one block has no row, some, or both all.
FEW = [Shape(2, 4, 2, 193, 129), Shape(1, 3, 1, 257, 192), Shape(1, 2, 2, 65, 65)]


@pytest.mark.parametrize("shape", FEW, ids=str)
@pytest.mark.parametrize("kernel", FIXED, ids=short)
def test_a_pair_shares_the_rows_of_any_kv_tile(kernel: KernelSpec, shape: Shape) -> None:
    for index, keywords in enumerate(MASKS[operation(kernel).mask]):
        arena.verify(arena.make(kernel, shape, turned=index % 2 == 1, seed=index, **keywords))


@pytest.mark.parametrize("name", [name for name, one in SHAPES.items() if one.heads < 16])
@pytest.mark.parametrize("kernel", FIXED, ids=short)
def test_a_pair_is_right_at_every_length(kernel: KernelSpec, name: str) -> None:
    arena.verify(arena.make(kernel, SHAPES[name], **MASKS[operation(kernel).mask][0]))


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("kernel", PACKED, ids=short)
def test_a_pair_takes_packed_sequences_as_if_each_were_alone(kernel: KernelSpec, name: str) -> None:
    for keywords in MASKS[operation(kernel).mask]:
        arena.verify(arena.packed(kernel, *LENGTHS[name], past=5, **keywords))


@pytest.mark.parametrize("kernel", FIXED, ids=short)
def test_a_pair_stores_no_column_of_a_dim_that_tensors_lack(kernel: KernelSpec) -> None:
    keywords, dim = MASKS[operation(kernel).mask][0], operation(kernel).dim - 24
    for turned in (False, True):
        arena.verify(arena.make(kernel, FEW[0], dim=dim, turned=turned, **keywords))


@pytest.mark.parametrize("name", [name for name in SIMPLE if name.startswith("pair")])
def test_a_pair_comes_to_the_same_gradients_however_its_blocks_run(name: str) -> None:
    made = arena.make(SIMPLE[name], Shape(2, 8, 4, 1031, 1031), causal=True)
    wanted = arena.clones(arena.verify(made))
    for _ in range(200):  # one block is ahead of the other by chance
        found = made.run()
        assert torch.equal(found[1], wanted[1])
        assert torch.equal(found[2], wanted[2])
        assert "deterministic" not in name or torch.equal(found[0], wanted[0])
