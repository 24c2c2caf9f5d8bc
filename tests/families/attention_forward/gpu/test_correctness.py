"""Every attention kernel against float64: dims, types, masks, softcap, heads, packed, schedules."""

from __future__ import annotations

from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import attention_arena as arena
import attention_cases as cases
import pytest
import torch
from attention_cases import EMPTY, LENGTHS, LONG, MASKS, SHAPES, SIMPLE, Shape, operation, short
from rooms import assert_repeats

import warploom
from warploom.errors import WarploomError
from warploom.generator.artifact import Artifact
from warploom.generator.build import build_many
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import kernel as kernels
from warploom.runtime.elements import TORCH
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.block_mask import of_dense

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
over_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
MOST = {name: shape for name, shape in SHAPES.items() if shape.heads < 16}  # the rest take long
over_most_shapes = pytest.mark.parametrize("shape", MOST.values(), ids=MOST)


def test_no_kernel_spills_or_has_its_products_serialised(
    built: dict[str, Artifact],
) -> None:
    resources = {name: artifact.resources[name] for name, artifact in built.items()}
    spilled = {name for name, used in resources.items() if used.spill_bytes or used.local_bytes}
    assert spilled == set()
    assert [name for name, artifact in built.items() if artifact.serialised] == []


def verify_masks(kernel: KernelSpec, shape: Shape) -> None:
    """Verify a call of every mask that the kernel is for, in both orders of dimensions."""
    for index, keywords in enumerate(MASKS[operation(kernel).mask]):
        arena.verify(arena.call(kernel, shape, turned=index % 2 == 1, seed=index, **keywords))


@over_most_shapes
@pytest.mark.parametrize("kernel", cases.OPERATIONS, ids=short)
def test_no_dim_type_or_mask_is_wrong_at_any_length(kernel: KernelSpec, shape: Shape) -> None:
    verify_masks(kernel, shape)


@over_most_shapes
@pytest.mark.parametrize("kernel", cases.SOFTCAPS, ids=short)
def test_a_softcap_is_applied_before_the_mask(kernel: KernelSpec, shape: Shape) -> None:
    verify_masks(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", cases.SCHEDULES, ids=short)
def test_no_schedule_loses_a_tile_of_rows_or_columns(kernel: KernelSpec, shape: Shape) -> None:
    for causal in ("bottom_right", "top_left"):
        arena.verify(arena.call(kernel, shape, causal=causal))


@pytest.mark.parametrize("kernel", [*SIMPLE.values(), *cases.OPERATIONS[6:9]], ids=short)
def test_4097_rows_and_columns_are_right(kernel: KernelSpec) -> None:
    if operation(kernel).lengths == "packed":
        arena.verify(arena.packed(kernel, [4097, 1], [4097, 1], causal="bottom_right"))
    else:
        arena.verify(arena.call(kernel, LONG, **MASKS[operation(kernel).mask][0]))


def test_every_schedule_of_the_shipped_space_is_right_on_a_small_case() -> None:
    file = resources.files("warploom.configs") / "attention_forward" / "candidates.yaml"
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
            arena.verify(arena.call(kernel, Shape(2, 4, 2, 257, 193), **keywords))


@pytest.mark.parametrize("dim", cases.OTHER_DIMS)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_a_dim_between_those_of_kernels_is_filled_with_zeros(dim: int, causal: bool | str) -> None:
    shape = Shape(2, 4, 2, 129, 193)
    for turned in (False, True):  # the room beside each row is NaN
        arena.verify(arena.call(None, shape, dim=dim, turned=turned, causal=causal))


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_an_extent_of_0_is_not_handed_to_the_tensor_memory_accelerator(
    name: str, causal: bool | str
) -> None:
    launches = warploom.counters.launches
    arena.verify(arena.call(None, EMPTY[name], dim=64, causal=causal))
    assert warploom.counters.launches == launches


@pytest.mark.parametrize("kernel", [SIMPLE["causal"], SIMPLE["dynamic"]], ids=short)
@pytest.mark.parametrize("seq_k", [1, 64, 200])
def test_rows_that_attend_to_nothing_are_0_and_their_lse_minus_infinity(
    kernel: KernelSpec, seq_k: int
) -> None:
    out, lse = arena.verify(arena.call(kernel, Shape(2, 4, 2, 700, seq_k), causal="bottom_right"))
    assert (out[:, :, : 700 - seq_k] == 0).all()
    assert (lse[:, :, : 700 - seq_k] == -torch.inf).all()
    assert lse[:, :, 700 - seq_k :].isfinite().all()


@pytest.mark.parametrize("kernel", cases.OPERATIONS[3:9], ids=short)
def test_scores_of_1e4_do_not_overflow(kernel: KernelSpec) -> None:
    keywords = MASKS[operation(kernel).mask][0]
    made = arena.call(kernel, Shape(2, 3, 3, 257, 193), size=40.0, scale=1.0, **keywords)
    assert made.reference(reference.exact)[1].nan_to_num(neginf=0).abs().max() > 1e4
    # The plain expression rounds such scores to multiples of 16 or 32: how far it is off is luck.
    out, _ = arena.verify(made, beside_plain=False)
    assert out.isfinite().all()


@pytest.mark.parametrize("rise", [1.0, 7.0, 30.0])
@pytest.mark.parametrize("kernel", cases.RESCALES, ids=short)
def test_weights_do_not_grow_without_end_where_scores_rise_from_tile_to_tile(
    kernel: KernelSpec, rise: float
) -> None:
    """Kernels go from the last columns to the first, and may stay behind a maximum by 2^8."""
    made = arena.call(
        kernel, Shape(1, 2, 1, 193, 1000), scale=1.0, **MASKS[operation(kernel).mask][0]
    )
    q, k, _ = made.given
    q.mul_(0.1)
    q[..., 0] = 1
    k[..., 0] = torch.arange(1000, 0, -1, device="cuda") * (rise / 64)
    out, _ = arena.verify(made, beside_plain=False)
    assert out.isfinite().all()


@pytest.mark.parametrize("scale", [1e-6, 0.3, 2.0])
def test_a_scale_is_the_one_that_is_given(scale: float) -> None:
    arena.verify(arena.call(SIMPLE["causal"], SHAPES["127"], scale=scale, causal=True))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (8, 4), (8, 2), (8, 1), (7, 7)])
@pytest.mark.parametrize("kernel", [SIMPLE["causal"], SIMPLE["long"]], ids=short)
def test_query_heads_read_the_keys_of_their_group(
    kernel: KernelSpec, heads: int, kv_heads: int
) -> None:
    arena.verify(arena.call(kernel, Shape(3, heads, kv_heads, 193, 193), causal=True))


def test_a_wider_mask_or_dim_computes_what_a_narrower_call_asks_for() -> None:
    shape = Shape(2, 4, 2, 257, 193)
    for kernel in (SIMPLE["causal"], SIMPLE["long"]):
        arena.verify(arena.call(kernel, shape, dim=40))
        arena.verify(arena.call(kernel, shape, dim=64, causal="bottom_right"))
    for kernel in cases.OPERATIONS:
        if operation(kernel).mask == "window" and operation(kernel).dim == 64:
            arena.verify(arena.call(kernel, shape))
            arena.verify(arena.call(kernel, shape, causal="top_left"))


# ---- Packed lengths ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("kernel", cases.PACKED, ids=short)
def test_packed_sequences_are_as_if_each_were_alone(kernel: KernelSpec, name: str) -> None:
    for keywords in MASKS[operation(kernel).mask]:
        arena.verify(arena.packed(kernel, *LENGTHS[name], past=5, **keywords))


@pytest.mark.parametrize("kernel", cases.PACKED[:3], ids=short)
def test_packed_lengths_and_fixed_ones_agree(kernel: KernelSpec) -> None:
    keywords = MASKS[operation(kernel).mask][0]
    made = arena.packed(kernel, [193] * 3, [193] * 3, **keywords)
    out, _ = arena.verify(made)
    q, k, v = (tensor.unflatten(0, (3, 193)).transpose(1, 2) for tensor in made.given)
    fixed = warploom.attention(q, k, v, **keywords).transpose(1, 2).flatten(0, 1)
    assert torch.allclose(out.float(), fixed.float(), atol=2e-2, rtol=2e-2)


# ---- Sinks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", cases.SINKS, ids=short)
def test_a_sink_counts_in_the_sum_of_its_head(kernel: KernelSpec) -> None:
    if operation(kernel).lengths == "packed":
        for name, keywords in product(LENGTHS, MASKS[operation(kernel).mask]):
            arena.verify(arena.packed(kernel, *LENGTHS[name], past=5, **keywords))
    else:
        for shape in MOST.values():
            verify_masks(kernel, shape)


@pytest.mark.parametrize("sink", [-torch.inf, -1e4, 1e4])
@pytest.mark.parametrize("kernel", cases.SINKS[2:4], ids=short)
def test_a_sink_of_any_size_is_right(kernel: KernelSpec, sink: float) -> None:
    sinks = torch.full((4,), sink, device="cuda")
    keywords = {"causal": "bottom_right", "sinks": sinks.to(TORCH[operation(kernel).element])}
    if operation(kernel).sinks == "fp32":
        keywords["sinks"] = sinks
    made = (
        arena.packed(kernel, [65, 300], [200, 5], **keywords)
        if operation(kernel).lengths == "packed"
        else arena.call(kernel, Shape(2, 4, 2, 300, 200), **keywords)
    )
    out, lse = arena.verify(made, beside_plain=False)
    assert out.isfinite().all()
    assert not lse.isnan().any()


# ---- Scores that are changed ---------------------------------------------------------------------


@pytest.mark.parametrize("kernel", cases.SCORED, ids=short)
def test_what_is_added_to_scores_and_what_is_masked_is_of_their_row_and_column(
    kernel: KernelSpec,
) -> None:
    if operation(kernel).lengths == "packed":
        for name, keywords in product(LENGTHS, MASKS[operation(kernel).mask]):
            arena.verify(arena.packed(kernel, *LENGTHS[name], past=5, **keywords))
    else:
        for shape in MOST.values():
            verify_masks(kernel, shape)


# ---- Dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [*cases.DROPOUT, *cases.COMBINED], ids=short)
def test_weights_are_dropped_where_the_mask_says(kernel: KernelSpec) -> None:
    if operation(kernel).lengths == "packed":
        for name, keywords in product(LENGTHS, MASKS[operation(kernel).mask]):
            arena.verify(arena.packed(kernel, *LENGTHS[name], past=5, **keywords))
    else:
        for shape in MOST.values():
            verify_masks(kernel, shape)


def beside(name: str, shown: torch.Tensor) -> dict[str, Any]:
    """What a call is given whose scores count where they are shown, and are all equal."""
    if name == "a mask":
        return {"mask": shown}
    if name == "a bias":
        return {"bias": torch.zeros(shown.shape, device="cuda").masked_fill(~shown, -torch.inf)}
    if name == "slopes":
        return {"alibi_slopes": torch.zeros(shown.shape[1], device="cuda"), "mask": shown}
    return {"block_mask": of_dense(shown, (64, 32))} if name == "blocks" else {}


@pytest.mark.parametrize(
    ("p", "others"),
    [
        *product((0.05, 0.1, 0.125, 1 / 3, 0.5, 0.99), ("nothing",)),
        *product((0.1,), ("a mask", "a bias", "slopes", "blocks")),
    ],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_the_mask_is_that_of_both_passes_bit_for_bit(dim: int, p: float, others: str) -> None:
    # With equal scores, and v of one column's 1, each element of out and of dv tells of one weight:
    # a backward pass that does not repeat the mask, or repeats another's, would differ.
    state = torch.randint(-(1 << 62), 1 << 62, (2,), device="cuda")
    kept = warploom.dropout_mask(state, p, 3, 4, 333, dim)
    shown = torch.rand(3, 4, 333, dim, device="cuda") < 0.8
    shown[:, :, 100:170] = False
    told = beside(others, shown)
    kept = kept & shown if told else kept
    q = torch.zeros(3, 4, 333, dim, device="cuda", dtype=torch.bfloat16)
    k, one = q[:, :, :dim], torch.eye(dim, device="cuda", dtype=torch.bfloat16)
    v = one.expand(3, 4, dim, dim).clone().requires_grad_()
    out = warploom.attention(q, k, v, dropout_p=p, dropout_state=state, **told)
    assert torch.equal(out != 0, kept)
    for first in range(0, 333, dim):
        dout = torch.zeros_like(out)
        some = dout[:, :, first : first + dim]
        some.copy_(one[: some.shape[2]].expand_as(some))
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        rows = kept[:, :, first : first + dim]
        assert torch.equal((dv != 0).mT[:, :, : rows.shape[2]], rows)


@pytest.mark.parametrize("p", [0.05, 0.1, 1 / 3, 0.5])
def test_the_mean_of_the_output_is_that_of_what_is_attended_to(p: float) -> None:
    # fp16: rounding to bf16 moves the mean by more than three deviations of the mask.
    q = torch.zeros(1, 16, 2048, 64, device="cuda", dtype=torch.float16)
    state = torch.tensor([7, 1], device="cuda")
    out = warploom.attention(q, q, torch.ones_like(q), dropout_p=p, dropout_state=state)
    keep = round((1 - p) * 65536) / 65536
    deviation = ((1 - keep) / keep / (16 * 2048 * 2048)) ** 0.5
    shift = 2.0**-15  # of rounding to fp16, at most
    assert abs(float(out[..., 0].double().mean()) - 1) < 3 * deviation + shift


def test_replays_of_a_graph_drop_others_and_a_state_that_is_given_the_same() -> None:
    q = torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    state = torch.tensor([1, 2], device="cuda")

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        drawn = warploom.attention(q, q, q, dropout_p=0.5)
        return drawn, warploom.attention(q, q, q, dropout_p=0.5, dropout_state=state)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    graph.replay()
    first = [one.clone() for one in found]
    graph.replay()
    assert not torch.equal(first[0], found[0])
    assert torch.equal(first[1], found[1])
    state.copy_(torch.tensor([3, 4]))
    graph.replay()
    assert not torch.equal(first[1], found[1])


# ---- The bound, repeats --------------------------------------------------------------------------


def test_the_bound_would_notice_a_lost_column_or_two_swapped_fragments() -> None:
    made = arena.call(SIMPLE["none"], Shape(1, 2, 1, 257, 193))
    out, lse = (t.clone() for t in arena.verify(made))
    q, k, v = made.given
    lost = warploom.attention(q, k[:, :, :-1], v[:, :, :-1], return_lse=True)
    swapped = out.clone()
    swapped[..., 0:8], swapped[..., 8:16] = out[..., 8:16], out[..., 0:8]
    for wrong in ((lost[0], lse), (out, lost[1]), (swapped, lse)):
        with pytest.raises(AssertionError, match="are wrong"):
            arena.assert_right(made, *wrong)


@pytest.mark.parametrize("name", ["causal", "long", "packed", "dynamic"])
def test_a_kernel_is_bit_equal_over_1000_runs_beside_another_kernel(name: str) -> None:
    kernel = SIMPLE[name]
    if name == "packed":
        lengths = [65, 1, 128, 63, 200]
        made = arena.packed(kernel, lengths, lengths, causal="bottom_right")
    else:
        made = arena.call(kernel, Shape(2, 20, 4, 517, 517), causal=True)
    wanted = [t.clone() for t in arena.verify(made)]
    assert_repeats(made.run, wanted, [made.out])


def test_the_table_chooses_a_kernel_that_is_right() -> None:
    for dim, length in ((64, 300), (128, 1100), (256, 300)):
        wanted = AttentionOperation("bf16", dim, "causal")  # type: ignore[arg-type]
        made = arena.call(None, Shape(1, 4, 2, length, length), dim=dim, causal=True)
        arena.verify(made)
        plan = warploom.plan_attention(*made.given, out=made.out.view, causal=True)
        assert plan.choice.spec.operation == wanted
        assert warploom.explain(plan).copies == ()
