"""Gradients where v has another head dimension than q and k, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attention_backward_arena as arena
import attention_backward_cases as cases
import pytest
import torch
from attention_backward_cases import LENGTHS, MANY_TILES, SIMPLE_UNLIKE, operation, short
from attention_cases import LONG, MASKS, SHAPES, Shape
from rooms import assert_repeats

import warploom
from warploom.errors import ProblemError
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unlike")]
over_simple = pytest.mark.parametrize("name", SIMPLE_UNLIKE)


@pytest.fixture(scope="module")
def unlike(build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]]) -> dict[str, Artifact]:
    """These kernels alone, so that this module is quick by itself."""
    return build(cases.UNLIKE)


def test_no_kernel_spills_or_has_its_products_serialised(unlike: dict[str, Artifact]) -> None:
    for name, artifact in unlike.items():
        for used in artifact.resources.values():
            assert (used.spill_bytes, used.local_bytes) == (0, 0), name
        assert artifact.serialised == (), name


@pytest.mark.parametrize("kernel", cases.UNLIKE, ids=short)
def test_no_mask_length_or_modifier_is_wrong_beside_v_of_another_dim(kernel: KernelSpec) -> None:
    wanted = operation(kernel)
    # Where a row attends to one column the plain expression's differences are of equal numbers.
    beside = not (wanted.dropout or wanted.column)
    if wanted.lengths == "packed":
        for name in LENGTHS:
            for keywords in MASKS[wanted.mask]:
                made = arena.packed(kernel, *LENGTHS[name], past=5, **keywords)
                arena.verify(made, beside_plain=beside)
        return
    for at, name in enumerate(("1", "65", "1000", "few rows", "few columns")):
        for index, keywords in enumerate(MASKS[wanted.mask]):
            turned, dlse = (at + index) % 2 == 1, index == 1
            made = arena.make(
                kernel, SHAPES[name], turned=turned, seed=index, dlse=dlse, **keywords
            )
            arena.verify(made, beside_plain=beside)


@over_simple
def test_more_tiles_than_multiprocessors_are_all_worked_off(name: str) -> None:
    shape = SHAPES["more tiles than multiprocessors"]
    arena.verify(arena.make(SIMPLE_UNLIKE[name], shape, causal="bottom_right"))


@over_simple
def test_4097_rows_and_columns_are_right(name: str) -> None:
    arena.verify(arena.make(SIMPLE_UNLIKE[name], LONG, causal=True))


@pytest.mark.parametrize(
    ("dim", "dim_v"), [(16, 8), (80, 56), (96, 64), (128, 64), (176, 120), (192, 64), (104, 96)]
)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_dims_below_those_of_the_kernel_are_filled_with_zeros(
    dim: int, dim_v: int, causal: bool | str
) -> None:
    for turned in (False, True):  # the room beside each row is NaN
        shape = Shape(2, 4, 2, 257, 193)
        arena.verify(arena.make(None, shape, dim=dim, dim_v=dim_v, turned=turned, causal=causal))


@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (192, 120), (96, 64), (80, 72)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_the_gradient_of_a_fully_masked_row_reaches_nothing(
    dim: int, dim_v: int, value: float
) -> None:
    """Main reads do where dq will be, whose rows are longer."""
    made = arena.make(None, Shape(2, 4, 2, 700, 200), dim=dim, dim_v=dim_v, causal="bottom_right")
    first = arena.clones(arena.verify(made))
    made.dout.view[:, :, 3:500:7] = value
    for one in made.gradients:
        one.room.fill_(-1)
    for found, clean in zip(made.run(), first, strict=True):
        assert torch.equal(found, clean)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (7, 7), (8, 1)])
def test_query_heads_add_to_the_gradients_of_their_group(heads: int, kv_heads: int) -> None:
    shape = Shape(2, heads, kv_heads, 193, 321)
    arena.verify(arena.make(None, shape, dim=192, dim_v=128, causal="bottom_right"))


def test_autograd_gives_each_tensor_a_gradient_of_its_shape() -> None:
    for dims in ((192, 128), (64, 40)):
        q, k, v = (
            torch.randn(2, 4, 300, dim, device="cuda").bfloat16().requires_grad_()
            for dim in (dims[0], *dims)
        )
        out = warploom.attention(q, k, v, causal=True)
        assert out.shape == (2, 4, 300, dims[1])
        found = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        assert [one.shape for one in found] == [q.shape, k.shape, v.shape]
        assert all(one.isfinite().all() for one in found)
    q = torch.randn(1, 2, 64, 256, device="cuda").bfloat16().requires_grad_()
    with pytest.raises(ProblemError, match="where the dimensions differ"):
        warploom.attention(q, q, q[..., :128])


def test_deterministic_gradients_are_bit_equal_over_runs_beside_another_kernel() -> None:
    made = arena.make(SIMPLE_UNLIKE["deterministic"], MANY_TILES, causal="bottom_right")
    wanted = arena.clones(arena.verify(made))
    assert_repeats(made.run, wanted, made.gradients, runs=200)
