"""Attention of 8 bits on a GPU: every kernel against float64, and how exact its sums are."""

from __future__ import annotations

import math
from typing import Any

import attention_cases as cases
import eight_bit_arena as arena
import pytest
import torch
from attention_cases import LENGTHS, MASKS, SHAPES, Shape, operation, short
from eight_bit_cases import E4M3, drawn, packed

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.families._attention import AttentionShape
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.attention_forward.eight_bit_trial import EightBitTrial

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
MOST = {name: shape for name, shape in SHAPES.items() if shape.heads < 16}


@pytest.mark.parametrize("shape", MOST.values(), ids=MOST)
@pytest.mark.parametrize("kernel", [*arena.FIXED, *arena.WIDE[::2]], ids=short)
def test_no_dim_type_scale_or_mask_is_wrong_at_any_length(kernel: KernelSpec, shape: Shape) -> None:
    for index, keywords in enumerate(MASKS[operation(kernel).mask]):
        arena.verify(arena.call(kernel, shape, seed=index, **keywords))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kernel", [arena.CAUSAL, *arena.SCHEDULES], ids=short)
def test_no_schedule_loses_a_tile(kernel: KernelSpec, shape: Shape) -> None:
    for causal in ("bottom_right", "top_left"):
        arena.verify(arena.call(kernel, shape, causal=causal))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kernel", [*arena.PACKED, arena.WIDE[1]], ids=short)
def test_packed_sequences_do_not_see_each_other(
    kernel: KernelSpec, lengths: tuple[list[int], list[int]]
) -> None:
    for index, keywords in enumerate(MASKS[operation(kernel).mask]):
        arena.verify(arena.packed(kernel, *lengths, seed=index, **keywords))


# ---- How exact sums are --------------------------------------------------------------------------


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The relative error of all elements together."""
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("keys", [8192, 131072])
@pytest.mark.parametrize("kernel", [arena.PLAIN, arena.INT8], ids=short)
def test_promoted_sums_keep_a_mean_of_v(kernel: KernelSpec, keys: int) -> None:
    made = arena.call(kernel, Shape(1, 1, 1, 64, keys))
    out, _ = arena.verify(made)
    assert relative(out, made.made.exact[0]) < 0.004


def test_fast_sums_lose_it_and_are_within_their_bound() -> None:
    made = arena.call(arena.FAST, Shape(1, 1, 1, 64, 8192))
    out, _ = arena.verify(made)
    assert relative(out, made.made.exact[0]) > 0.01  # or promoted sums are for nothing


@pytest.mark.parametrize("kernel", [arena.PLAIN, arena.INT8], ids=short)
def test_one_key_of_128k_with_half_of_the_weight_is_seen(kernel: KernelSpec) -> None:
    keys, dim = 131072, operation(kernel).dim
    made = arena.call(kernel, Shape(1, 1, 1, 64, keys)).made
    kind = made.q.dtype
    codes = made.k.float().zero_()  # all scores are 0, but for those of one key
    codes[0, 0, 70001] = 64
    made.k = codes.to(kind)
    made.q = torch.full_like(made.q.float(), 64).to(kind)
    made.v = torch.randn(1, 1, keys, dim, device="cuda").add(1).mul(64).to(E4M3)
    per_score = math.log(keys - 1) / (64 * 64 * dim)  # the one weighs as much as all others
    ones = {name: torch.ones_like(made.keywords[name]) for name in ("q_descale", "k_descale")}
    given = {
        **made.keywords,
        **ones,
        "scale": per_score,
        "v_descale": torch.ones(1, 1, device="cuda"),
    }
    made.keywords = given
    out = warploom.attention(made.q, made.k, made.v, **given)
    exact, _ = made.exact
    assert ((out.double() - exact).abs().amax() / exact.abs().amax()) < 0.01


@pytest.mark.parametrize("kernel", [arena.PLAIN, arena.INT8, arena.CAUSAL], ids=short)
def test_maxima_that_rise_in_every_tile_are_right(kernel: KernelSpec) -> None:
    causal = {"causal": "bottom_right"} if operation(kernel).mask == "causal" else {}
    arena.verify(arena.call(kernel, Shape(1, 2, 1, 200, 4000), rising=True, **causal))


# ---- What calls may have -------------------------------------------------------------------------


def test_v_by_keys_is_laid_out_in_a_copy_that_is_counted() -> None:
    for made in (drawn(device="cuda", dim=128), packed([70, 0, 5], [130, 3, 64], device="cuda")):
        before = warploom.counters.copies
        out = warploom.attention(made.q, made.k, made.v, **made.keywords)
        assert warploom.counters.copies == before + 1
        given = {**made.keywords, **made.dim_major()}
        assert torch.equal(warploom.attention(made.q, made.k, **given), out)
        assert warploom.counters.copies == before + 1
        launches = warploom.counters.launches
        warploom.attention(made.q, made.k, made.v, **made.keywords)
        assert warploom.counters.launches == launches + 2  # one of them lays v out


@pytest.mark.parametrize("kernel", [arena.PLAIN, arena.CAUSAL, arena.INT8], ids=short)
def test_results_are_bit_equal_from_run_to_run(kernel: KernelSpec) -> None:
    causal = {"causal": "bottom_right"} if operation(kernel).mask == "causal" else {}
    made = arena.call(kernel, Shape(4, 33, 11, 509, 349), **causal)
    operands = made.operands()
    first = [one.clone() for one in warploom.attention(**operands, return_lse=True)]
    for _ in range(50):
        for one, other in zip(warploom.attention(**operands, return_lse=True), first, strict=True):
            assert torch.equal(one, other)


def test_scales_of_0_and_nan_and_rows_without_a_key() -> None:
    made = drawn(seq_q=200, seq_k=136, dim=128, device="cuda", causal="bottom_right")
    operands = {**made.keywords, **made.dim_major()}
    out, lse = warploom.attention(made.q, made.k, **operands, return_lse=True)
    assert (out[:, :, :64] == 0).all()
    assert (lse[:, :, :64] == -torch.inf).all()
    assert lse[:, :, 64:].isfinite().all()
    zero = torch.zeros(2, 2, device="cuda")
    assert (warploom.attention(made.q, made.k, **{**operands, "v_descale": zero}) == 0).all()
    out, lse = warploom.attention(
        made.q, made.k, **{**operands, "q_descale": zero}, return_lse=True
    )
    seen = torch.arange(1, 137, device="cuda").log()
    assert torch.allclose(lse[0, 0, 64:], seen, atol=1e-4)
    assert out.isfinite().all()
    wrong = made.keywords["k_descale"].clone()
    wrong[0, 0] = math.nan
    out = warploom.attention(made.q, made.k, **{**operands, "k_descale": wrong})
    assert out[0, :2, 64:].isnan().all()
    assert out[0, 2:].isfinite().all()


def test_scales_have_any_strides() -> None:
    made = drawn(dim=128, device="cuda")
    own = {**made.keywords, **made.dim_major()}
    strided = {name: own[name].t().contiguous().t() for name in ("q_descale", "k_descale")}
    one = own["v_descale"][:1, :1].expand(2, 2)
    out = warploom.attention(made.q, made.k, **{**own, **strided, "v_descale": one})
    wanted = warploom.attention(made.q, made.k, **{**own, "v_descale": one.contiguous()})
    assert torch.equal(out, wanted)


def test_a_graph_and_warm_calls_read_new_scales() -> None:
    made = drawn(dim=128, device="cuda")
    own: dict[str, Any] = {**made.keywords, **made.dim_major()}
    first = warploom.attention(made.q, made.k, **own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = warploom.attention(made.q, made.k, **own)
    own["v_descale"] *= 2
    graph.replay()
    again = warploom.attention(made.q, made.k, **own)
    assert torch.equal(captured, again)
    assert torch.equal(again, first * 2)


@pytest.mark.parametrize("kernel", [arena.PLAIN, arena.INT8, arena.PACKED[1]], ids=short)
def test_trials_of_the_tuner_hold(kernel: KernelSpec) -> None:
    wanted = operation(kernel)
    total = 700 if wanted.lengths == "packed" else 0
    shape = AttentionShape(2, 4, 2, 500, 500, wanted.dim, total_q=total, total_k=total)
    assert EightBitTrial(wanted, shape, "cuda", 0).error_share(kernel) < 1


def test_no_kernel_spills_or_has_its_products_serialised(built: dict[str, Artifact]) -> None:
    own = [built[kernel.name] for kernel in arena.ALL]
    assert not any(one.serialised for one in own)
    used = [one.resources[kernel.name] for kernel, one in zip(arena.ALL, own, strict=True)]
    assert not any(one.spill_bytes or one.local_bytes for one in used)
    assert len({cases.short(kernel) for kernel in arena.ALL}) == len(arena.ALL)
