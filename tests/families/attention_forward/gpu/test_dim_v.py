"""Kernels whose v has another head dimension than q and k, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attention_arena as arena
import attention_block_cases as blocks
import attention_cases as cases
import pytest
import torch
from attention_cases import LENGTHS, LONG, MASKS, SHAPES, Shape, operation, short
from rooms import assert_repeats

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.families._attention import UNLIKE_DIMS
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unlike")]
MANY = "more tiles than multiprocessors"
over_pairs = pytest.mark.parametrize(("dim", "dim_v"), UNLIKE_DIMS)


@pytest.fixture(scope="module")
def unlike(build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]]) -> dict[str, Artifact]:
    """These kernels alone, so that this module is quick by itself."""
    return build(cases.UNLIKE)


def test_no_kernel_spills_or_has_its_products_serialised(unlike: dict[str, Artifact]) -> None:
    for name, artifact in unlike.items():
        used = artifact.resources[name]
        assert (used.spill_bytes, used.local_bytes, artifact.serialised) == (0, 0, ()), name


@pytest.mark.parametrize("kernel", cases.UNLIKE, ids=short)
def test_no_mask_length_or_modifier_is_wrong_beside_v_of_another_dim(kernel: KernelSpec) -> None:
    wanted = operation(kernel)
    if wanted.lengths == "packed":
        for name in LENGTHS:
            for keywords in MASKS[wanted.mask]:
                arena.verify(arena.packed(kernel, *LENGTHS[name], past=5, **keywords))
        return
    for at, name in enumerate(("1", "65", "1000", "few rows", "few columns", MANY)):
        shape = SHAPES[name]
        if wanted.blocks:
            for mask in ("documents", "scores", "lists of 48, within tiles"):
                listed = {"block_mask": blocks.MASKS[mask](shape)}
                arena.verify(arena.call(kernel, shape, turned=at % 2 == 1, **listed))
            continue
        for index, keywords in enumerate(MASKS[wanted.mask]):
            turned = (at + index) % 2 == 1
            arena.verify(arena.call(kernel, shape, turned=turned, seed=index, **keywords))


@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [
        (8, 16),
        (40, 64),
        (80, 56),
        (104, 64),
        (56, 104),
        (176, 120),
        (192, 64),
        (256, 128),
        (72, 240),
    ],
)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_dims_between_those_of_kernels_are_filled_with_zeros(
    dim: int, dim_v: int, causal: bool | str
) -> None:
    for turned in (False, True):  # the room beside each row is NaN
        shape = Shape(2, 4, 2, 129, 193)
        arena.verify(arena.call(None, shape, dim=dim, dim_v=dim_v, turned=turned, causal=causal))


@over_pairs
def test_4097_rows_and_columns_are_right(dim: int, dim_v: int) -> None:
    arena.verify(arena.call(None, LONG, dim=dim, dim_v=dim_v, causal=True))


@over_pairs
def test_query_heads_read_the_keys_of_their_group(dim: int, dim_v: int) -> None:
    for heads, kv_heads in ((8, 8), (8, 2), (7, 7), (8, 1)):
        shape = Shape(3, heads, kv_heads, 193, 193)
        arena.verify(arena.call(None, shape, dim=dim, dim_v=dim_v, causal=True))


@over_pairs
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_in_a_key_reaches_the_rows_that_attend_to_it(dim: int, dim_v: int, which: str) -> None:
    made = arena.call(None, Shape(2, 4, 2, 517, 517), dim=dim, dim_v=dim_v, causal=True)
    clean = [t.clone() for t in arena.verify(made)]
    getattr(made, which).view[1, 1, 300, 3] = torch.nan
    out, _ = made.run()
    assert out[1, 2:4, 300:, 3].isnan().all()
    assert torch.equal(out[0], clean[0][0])
    assert torch.equal(out[1, :2], clean[0][1, :2])
    assert torch.equal(out[1, 2:4, :44], clean[0][1, 2:4, :44])  # two tiles before
    if which == "v":
        other = [column for column in range(dim_v) if column != 3]
        assert torch.equal(out[..., other], clean[0][..., other])


def test_the_table_chooses_a_kernel_of_the_pair() -> None:
    for dim, dim_v in UNLIKE_DIMS:
        made = arena.call(None, Shape(1, 4, 2, 300, 300), dim=dim, dim_v=dim_v, causal=True)
        plan = warploom.plan_attention(*made.given, out=made.out.view, causal=True)
        wanted = plan.choice.spec.operation
        assert (wanted.dim, wanted.dim_v) == (dim, dim_v)
        assert warploom.explain(plan).copies == ()


@over_pairs
def test_a_kernel_is_bit_equal_over_runs_beside_another_kernel(dim: int, dim_v: int) -> None:
    made = arena.call(None, Shape(2, 20, 4, 517, 517), dim=dim, dim_v=dim_v, causal=True)
    wanted = [t.clone() for t in arena.verify(made)]
    assert_repeats(made.run, wanted, [made.out])
