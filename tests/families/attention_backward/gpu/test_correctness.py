"""Every backward kernel against float64: dims, types, masks, softcap, heads, packed, schedules."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import attention_backward_arena as arena
import attention_backward_cases as cases
import pytest
import torch
from attention_arena import assert_within
from attention_backward_cases import LENGTHS, MANY_TILES, SIMPLE, operation, short
from attention_cases import EMPTY, LONG, MASKS, SHAPES, Shape

import warploom
from warploom.errors import WarploomError
from warploom.generator.artifact import Artifact
from warploom.generator.build import build_many
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import kernel as kernels
from warploom.runtime.families.attention_backward import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
MOST = {name: shape for name, shape in SHAPES.items() if shape.heads < 16}  # the rest take long
over_most_shapes = pytest.mark.parametrize("shape", MOST.values(), ids=MOST)
FEW = [Shape(2, 4, 2, 257, 193), SHAPES["few rows"], SHAPES["few columns"]]
USUAL = [name for name in SIMPLE if "packed" not in name and name not in ("none", "dropout")]


def test_no_kernel_spills_or_has_its_products_serialised(
    built: dict[str, Artifact],
) -> None:
    ours = {name: built[name] for name in (kernel.name for kernel in cases.ALL)}
    spilled = {
        entry
        for artifact in ours.values()
        for entry, used in artifact.resources.items()
        if used.spill_bytes or used.local_bytes
    }
    assert spilled == set()
    assert [name for name, artifact in ours.items() if artifact.serialised] == []


def verify_masks(kernel: KernelSpec, shape: Shape, **others: Any) -> None:
    """Verify a pass of every mask that the kernel is for, in both orders of dimensions."""
    for index, keywords in enumerate(MASKS[operation(kernel).mask]):
        turned = index % 2 == 1
        arena.verify(arena.make(kernel, shape, turned=turned, seed=index, **keywords, **others))


@over_most_shapes
@pytest.mark.parametrize("kernel", cases.OPERATIONS, ids=short)
def test_no_dim_type_or_mask_is_wrong_at_any_length(kernel: KernelSpec, shape: Shape) -> None:
    verify_masks(kernel, shape)


@over_most_shapes
@pytest.mark.parametrize("kernel", cases.SOFTCAPS, ids=short)
def test_a_softcap_has_its_derivative(kernel: KernelSpec, shape: Shape) -> None:
    verify_masks(kernel, shape)


@pytest.mark.parametrize("name", [*USUAL, "none", "dropout"])
def test_more_tiles_than_multiprocessors_are_all_worked_off(name: str) -> None:
    shape = SHAPES["more tiles than multiprocessors"]
    arena.verify(arena.make(SIMPLE[name], shape, **MASKS[operation(SIMPLE[name]).mask][0]))


@pytest.mark.parametrize("name", SIMPLE)
def test_4097_rows_and_columns_are_right(name: str) -> None:
    kernel = SIMPLE[name]
    keywords = MASKS[operation(kernel).mask][0]
    if operation(kernel).lengths == "packed":
        arena.verify(arena.packed(kernel, [4097, 1], [4097, 1], **keywords))
    else:
        arena.verify(arena.make(kernel, LONG, **keywords))


def test_every_schedule_of_the_shipped_space_is_right_on_small_cases() -> None:
    file = resources.files("warploom.configs") / "attention_backward" / "candidates.yaml"
    with resources.as_file(file) as path:
        specs = expand_file(Path(path)).specs
    assert len(specs) > 10
    for result in build_many(specs, kernels.store()):
        if isinstance(result, WarploomError):
            raise result
    for kernel in specs:
        keywords = MASKS[operation(kernel).mask][0]
        if operation(kernel).lengths == "packed":
            arena.verify(arena.packed(kernel, [65, 0, 257], [193, 5, 130], **keywords))
        else:
            for shape in FEW[:2]:
                arena.verify(arena.make(kernel, shape, **keywords))


@pytest.mark.parametrize("dim", cases.OTHER_DIMS)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_a_dim_between_those_of_kernels_is_filled_with_zeros(dim: int, causal: bool | str) -> None:
    for turned in (False, True):  # the room beside each row is NaN
        arena.verify(arena.make(None, FEW[0], dim=dim, turned=turned, causal=causal))


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_an_extent_of_0_gives_gradients_of_0_without_a_launch(
    name: str, causal: bool | str
) -> None:
    shape, launches = EMPTY[name], warploom.counters.launches
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    lengths = (shape.seq_q, shape.seq_k, shape.seq_k)
    q, k, v = (
        torch.randn(shape.batch, h, n, 64, device="cuda").bfloat16().requires_grad_()
        for h, n in zip(heads, lengths, strict=True)
    )
    out = warploom.attention(q, k, v, causal=causal)  # type: ignore[call-overload]
    for one in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert (one == 0).all()
    assert warploom.counters.launches == launches


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("seq_k", [1, 64, 200])
def test_rows_that_attend_to_nothing_have_gradients_of_0_and_give_none(
    name: str, seq_k: int
) -> None:
    made = arena.make(SIMPLE[name], Shape(2, 4, 2, 700, seq_k), causal="bottom_right")
    first = arena.clones(arena.verify(made))
    assert (first[0][:, :, : 700 - seq_k] == 0).all()
    made.dout.view[:, :, : 700 - seq_k] = 1e4
    dk, dv = made.run()[1:]
    assert torch.equal(dk, first[1])
    assert torch.equal(dv, first[2])


@pytest.mark.parametrize("name", USUAL)
def test_columns_that_no_row_attends_to_have_gradients_of_0(name: str) -> None:
    made = arena.make(SIMPLE[name], Shape(2, 4, 2, 100, 700), causal="top_left")
    _, dk, dv = arena.verify(made)
    for one in (dk, dv):
        assert (one[:, :, 100:] == 0).all()
        assert (one[:, :, :100] != 0).any(-1).all()


@pytest.mark.parametrize("kernel", cases.OPERATIONS[3:9], ids=short)
def test_scores_of_1e4_do_not_overflow(kernel: KernelSpec) -> None:
    keywords = MASKS[operation(kernel).mask][0]
    made = arena.make(kernel, Shape(2, 3, 3, 257, 193), size=40.0, scale=1.0, **keywords)
    assert made.lse.nan_to_num(neginf=0).abs().max() > 1e4
    # The plain expression rounds such scores to multiples of 16 or 32: how far it is off is luck.
    found = arena.verify(made, beside_plain=False)
    assert all(one.isfinite().all() for one in found)


@pytest.mark.parametrize("scale", [1e-6, 0.3, 2.0])
def test_a_scale_is_the_one_that_is_given(scale: float) -> None:
    arena.verify(arena.make(SIMPLE["causal"], SHAPES["127"], scale=scale, causal=True))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (8, 4), (8, 2), (8, 1), (7, 7)])
@pytest.mark.parametrize("name", USUAL)
def test_keys_have_the_gradients_of_all_query_heads_of_their_group(
    name: str, heads: int, kv_heads: int
) -> None:
    arena.verify(arena.make(SIMPLE[name], Shape(3, heads, kv_heads, 193, 193), causal=True))


ALL_CLUSTERS = [*cases.CLUSTERS, *cases.DETERMINISTIC_CLUSTERS]
SHARING = (1, 2, 3, 4, 7, 8)  # query heads of a kv head: fewer than blocks of a cluster, and more


@pytest.mark.parametrize("kernel", ALL_CLUSTERS, ids=short)
@pytest.mark.parametrize("sharing", SHARING)
def test_a_cluster_shares_out_any_number_of_query_heads(kernel: KernelSpec, sharing: int) -> None:
    if operation(kernel).lengths == "packed":
        for keywords in MASKS[operation(kernel).mask][:2]:
            for name in ("other keys", "some empty"):
                heads = {"heads": 2 * sharing, "kv_heads": 2}
                arena.verify(arena.packed(kernel, *LENGTHS[name], past=5, **heads, **keywords))
    else:
        for shape in (Shape(2, 2 * sharing, 2, 193, 257), Shape(1, sharing, 1, 65, 1021)):
            verify_masks(kernel, shape)


@pytest.mark.parametrize(
    "kernel", [one for one in ALL_CLUSTERS if operation(one).lengths == "fixed"], ids=short
)
def test_a_cluster_stores_no_column_of_a_dim_that_tensors_lack(kernel: KernelSpec) -> None:
    shape, dim = Shape(2, 6, 2, 131, 193), operation(kernel).dim - 24
    for turned in (False, True):
        keywords = MASKS[operation(kernel).mask][0]
        arena.verify(arena.make(kernel, shape, dim=dim, turned=turned, **keywords))


@pytest.mark.parametrize("shape", FEW, ids=str)
@pytest.mark.parametrize("kernel", cases.HELD, ids=short)
def test_v_is_the_same_in_registers(kernel: KernelSpec, shape: Shape) -> None:
    if operation(kernel).lengths == "packed":
        lengths = [shape.seq_q, 1, 65], [shape.seq_k, 131, 64]
        for keywords in MASKS[operation(kernel).mask]:
            arena.verify(arena.packed(kernel, *lengths, past=5, **keywords))
    else:
        verify_masks(kernel, shape)
        verify_masks(kernel, shape, dim=operation(kernel).dim - 8)


def test_a_wider_mask_or_dim_computes_what_a_narrower_call_asks_for() -> None:
    for kernel in (SIMPLE["causal"], SIMPLE["long"], SIMPLE["deterministic"]):
        arena.verify(arena.make(kernel, FEW[0], dim=40))
        arena.verify(arena.make(kernel, FEW[0], dim=64, causal="bottom_right"))
    for kernel in cases.OPERATIONS:
        if operation(kernel).mask == "window" and operation(kernel).dim == 64:
            arena.verify(arena.make(kernel, FEW[0]))
            arena.verify(arena.make(kernel, FEW[0], causal="top_left"))


@pytest.mark.parametrize("name", SIMPLE)
def test_the_log_sum_exp_has_its_share_in_the_gradients(name: str) -> None:
    kernel = SIMPLE[name]
    keywords = MASKS[operation(kernel).mask][0]
    if operation(kernel).lengths == "packed":
        made = arena.packed(kernel, [65, 1, 128], [5, 300, 127], past=5, dlse=True, **keywords)
    else:
        made = arena.make(kernel, FEW[0], dlse=True, **keywords)
    arena.verify(made)


# ---- Packed lengths ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("kernel", cases.PACKED, ids=short)
def test_packed_sequences_are_as_if_each_were_alone(kernel: KernelSpec, name: str) -> None:
    for keywords in MASKS[operation(kernel).mask]:
        arena.verify(arena.packed(kernel, *LENGTHS[name], past=5, **keywords))


# ---- Sinks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("kernel", cases.SINKS, ids=short)
def test_a_sink_has_the_gradient_of_its_heads_rows(kernel: KernelSpec, dlse: bool) -> None:
    for keywords in MASKS[operation(kernel).mask]:
        if operation(kernel).lengths == "packed":
            for name in LENGTHS:
                arena.verify(arena.packed(kernel, *LENGTHS[name], past=5, dlse=dlse, **keywords))
        else:
            for shape in FEW:
                arena.verify(arena.make(kernel, shape, dlse=dlse, **keywords))


def test_the_gradient_of_sinks_is_bit_equal_from_run_to_run() -> None:
    for kernel in cases.SINKS[2:6]:
        keywords = MASKS[operation(kernel).mask][0]
        if operation(kernel).lengths == "packed":
            made = arena.packed(kernel, [131, 1, 700], [1030, 5, 700], **keywords)
        else:
            made = arena.make(kernel, MANY_TILES, **keywords)
        arena.verify(made)
        assert made.dsinks is not None
        first = made.dsinks.clone()
        for _ in range(20):
            made.run()
            assert torch.equal(made.dsinks, first)


# ---- Scores that are changed ---------------------------------------------------------------------


@pytest.mark.parametrize("kernel", cases.SCORED, ids=short)
def test_both_passes_change_the_same_scores_alike(kernel: KernelSpec) -> None:
    for index, keywords in enumerate(MASKS[operation(kernel).mask]):
        if operation(kernel).lengths == "packed":
            for name in LENGTHS:
                arena.verify(arena.packed(kernel, *LENGTHS[name], past=5, **keywords))
        else:
            for shape in FEW:
                arena.verify(arena.make(kernel, shape, turned=index % 2 == 1, **keywords))


# ---- Dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("kernel", [*cases.DROPOUT, *cases.COMBINED], ids=short)
def test_gradients_are_those_of_the_weights_that_were_kept(kernel: KernelSpec, dlse: bool) -> None:
    # Where a row attends to one column, the plain expression's differences of equal numbers are 0,
    # and here out is v over the probability, which is rounded: the bound alone is for that.
    for keywords in MASKS[operation(kernel).mask]:
        if operation(kernel).lengths == "packed":
            for name in LENGTHS:
                made = arena.packed(kernel, *LENGTHS[name], past=5, dlse=dlse, **keywords)
                arena.verify(made, beside_plain=False)
        else:
            for shape in FEW:
                made = arena.make(kernel, shape, dlse=dlse, **keywords)
                arena.verify(made, beside_plain=False)


# ---- From the front door -------------------------------------------------------------------------


def front_door(made: arena.Pass, **keywords: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of `warploom.attention` on the operands of a pass, by autograd."""
    leaves = [operand.detach().requires_grad_() for operand in made.forward.given]
    given = {**made.forward.keywords, **keywords}
    out = warploom.attention(*leaves, **given)  # type: ignore[call-overload]
    return torch.autograd.grad(out, leaves, made.dout.view)


@pytest.mark.parametrize("name", SIMPLE)
def test_autograd_comes_to_the_same_gradients(name: str) -> None:
    kernel = SIMPLE[name]
    if operation(kernel).lengths == "packed":
        lengths = [65, 1, 128, 63, 200]
        made = arena.packed(kernel, lengths, lengths, past=5, causal="bottom_right")
        made.dout.view[-5:] = 0
    else:
        made = arena.make(kernel, FEW[0], **MASKS[operation(kernel).mask][0])
    deterministic = operation(kernel).deterministic
    dq, dk, dv = front_door(made, deterministic=deterministic, backward_spec=kernel)
    arena.assert_right(made, (dq, dk, dv))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_table_chooses_a_kernel_that_is_right(dim: int) -> None:
    made = arena.make(None, Shape(1, 4, 2, 300, 300), dim=dim, causal=True)
    q, k, v = made.forward.given
    for deterministic in (False, True):
        dq, dk, dv = front_door(made, deterministic=deterministic)
        arena.assert_right(made, (dq, dk, dv))
        plan = warploom.plan_attention(q, k, v, causal=True, deterministic=deterministic)
        wanted = cases.chosen(dim, mask="causal", deterministic=deterministic, seq=300, sharing=2)
        assert warploom.explain(plan).backward == wanted.name


# ---- The bound, repeats --------------------------------------------------------------------------


def test_the_bound_would_notice_a_lost_tile_or_two_swapped_fragments() -> None:
    made = arena.make(SIMPLE["none"], FEW[0])
    right = arena.clones(arena.verify(made))
    exact, bound = (made.reference(f) for f in (reference.exact, reference.bound))
    made.dout.view[:, :, 240:] = 0  # as if these rows were lost
    lost = made.run()
    for name, one, less, *wanted in zip(arena.NAMES, right, lost, exact, bound, strict=True):
        swapped = one.clone()
        swapped[..., 0:8], swapped[..., 8:16] = one[..., 8:16], one[..., 0:8]
        for wrong in (less, swapped):
            with pytest.raises(AssertionError, match="are wrong"):
                assert_within(name, wrong, *wanted)


@pytest.mark.parametrize("name", ["none", "causal", "long", "wide", "packed", "cluster"])
def test_dk_and_dv_are_bit_equal_in_any_case(name: str) -> None:
    kernel = SIMPLE[name]
    if operation(kernel).lengths == "packed":
        made = arena.packed(kernel, [131, 1, 70], [1030, 5, 700], causal="bottom_right")
    else:
        made = arena.make(kernel, MANY_TILES, **MASKS[operation(kernel).mask][0])
    _, dk, dv = arena.clones(arena.verify(made))
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        found = made.run()
        differing += (found[1] != dk).sum() + (found[2] != dv).sum()
    assert differing.item() == 0
