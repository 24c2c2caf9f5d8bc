"""Attention on operands of 8 bits, without a GPU: layout, results of CPU tensors, rules, errors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import eight_bit_cases as cases
import pytest
import torch
from eight_bit_cases import E4M3, Drawn, drawn, packed

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_forward import (
    FAMILY,
    AttentionOperation,
    AttentionProblem,
    AttentionSchedule,
)
from warploom.generator.families.attention_forward.launch import padded_total
from warploom.generator.families.attention_forward.template import (
    OFFSET,
    OFFSET_IF_NEEDED,
    SLACK_8,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime.families.attention_forward import values
from warploom.runtime.families.attention_forward.eight_bit_trial import EightBitTrial
from warploom.runtime.families.attention_forward.trial import AttentionTrial

H200 = DeviceLimits(132, "NVIDIA H200")
OPERATION = AttentionOperation("bf16", 128, scores="e4m3", weights="e4m3")
SCHEDULE = AttentionSchedule(128, 128, overlap=False)


def run(made: Drawn, **keywords: Any) -> cases.Pair:
    """The results of a call, of v as it is given."""
    operands = {"v": made.v, **made.keywords, **keywords}
    return warploom.attention(made.q, made.k, **operands, return_lse=True)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The relative error of all elements together."""
    return float((found.double() - exact).norm() / exact.norm())


# ---- Layout --------------------------------------------------------------------------------------


def test_accumulators_of_scores_are_a_of_the_second_product_as_they_lie() -> None:
    """PTX ISA: wgmma's accumulators, and its A of 8 bits in registers, by thread."""
    key_of_place = values.dim_major(torch.arange(16, dtype=torch.uint8)[:, None].view(E4M3)[None])
    places = key_of_place.view(torch.uint8)[0, 0, :16].tolist()
    for thread in range(4):  # of a row
        # Accumulator 4 j + c is of column 8 j + 2 t + c; the row 8 below has two more of each four.
        columns = [8 * (i // 4) + 2 * thread + i % 4 for i in (0, 1, 4, 5)]
        assert [places[4 * thread + byte] for byte in range(4)] == columns  # A's 4 t to 4 t + 3


@pytest.mark.parametrize("keys", [1, 15, 16, 130, 256])
def test_v_is_laid_out_and_back_with_zeros_past_the_last_key(keys: int) -> None:
    v = torch.randn(2, 3, keys, 24).to(E4M3)
    laid_out = values.dim_major(v)
    assert laid_out.shape == (2, 3, 24, -(-keys // 128) * 128)
    assert torch.equal(values.by_keys(laid_out, keys).view(torch.uint8), v.view(torch.uint8))
    rest = values.by_keys(laid_out, laid_out.shape[-1])[:, :, keys:]
    assert (rest.view(torch.uint8) == 0).all()


def test_packed_sequences_begin_at_multiples_and_lie_as_alone() -> None:
    offsets = torch.tensor([0, 130, 130, 135, 400], dtype=torch.int32)
    v = torch.randn(410, 2, 16).to(E4M3)
    laid_out, starts = values.dim_major(v, offsets), values.padded_starts(offsets)
    assert laid_out.shape[-1] == padded_total(410, 4)
    assert (starts % 128 == 0).all()
    for index in range(4):
        rows = v[offsets[index] : offsets[index + 1]].transpose(0, 1)
        own = values.dim_major(rows[None])[0]
        begin = int(starts[index])
        here = laid_out[..., begin : begin + own.shape[-1]]
        assert torch.equal(here.view(torch.uint8), own.view(torch.uint8))
    back = values.packed_by_keys(laid_out, offsets, 410).view(torch.uint8)
    assert torch.equal(back[:400], v.view(torch.uint8)[:400])
    assert (back[400:] == 0).all()


# ---- Results of CPU tensors ----------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (50, 3)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([0.5, 2.0, -1.0, 4.0])},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("keywords", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("kind", [E4M3, torch.int8])
def test_results_are_within_their_bounds(
    kind: torch.dtype, blocks: bool, keywords: dict[str, Any]
) -> None:
    made = drawn(kind=kind, blocks=blocks, **keywords)
    out, lse = run(made)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    for found, exact, bound in zip((out, lse), made.exact, made.bound(), strict=True):
        assert ((found.double() - exact).abs() <= bound).all()
    laid_out, of_it = run(made, **made.dim_major())
    assert torch.equal(laid_out, out)
    assert torch.equal(of_it, lse)


def test_packed_sequences_have_their_own_scales_and_do_not_see_each_other() -> None:
    made = packed([70, 0, 5], [130, 3, 64], past=7, causal="bottom_right")
    out, lse = run(made)
    exact, bound = made.exact, made.bound()
    for found, right, off in zip(
        (out[:75], lse[:, :75]), _first(exact), _first(bound), strict=True
    ):
        assert ((found.double() - right).abs() <= off).all()
    again, _ = run(made, **made.dim_major())
    assert torch.equal(again[:75], out[:75])


def _first(pair: cases.Pair) -> cases.Pair:
    return pair[0][:75], pair[1][:, :75]


def test_v_of_16_bits_keeps_weights_exact() -> None:
    made = drawn(mean=0.0)
    v = made.v.float().bfloat16()
    wide = replace(made, v=v, keywords={**made.keywords, "v_descale": None})
    out, _ = run(wide)
    assert out.dtype == torch.bfloat16
    assert error(out, wide.exact[0]) < 0.004 < error(run(made)[0], made.exact[0])


def test_scores_of_int8_are_exacter_where_they_are_sharp() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, rows, 64) for rows in (64, 512, 512))
    q, v = q * 4, v + 0.3
    weights = torch.softmax(q.double() @ k.double().mT / 8, -1)
    exact, errors = weights @ v.double(), {}
    for kind in (E4M3, torch.int8):
        (q8, q_scale), (k8, k_scale) = (cases.quantized(one, (2, 3), kind) for one in (q, k))
        v8, v_scale = cases.quantized(v, (2, 3), E4M3)
        scales = [one.flatten(1) for one in (q_scale, k_scale, v_scale)]
        named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
        errors[kind] = error(warploom.attention(q8, k8, v8, **named), exact)
    assert errors[torch.int8] < 0.6 * errors[E4M3]


def test_rows_that_are_fully_masked_are_0_and_minus_infinity() -> None:
    made = drawn(seq_q=40, seq_k=8, causal="bottom_right")
    out, lse = run(made)
    assert (out[:, :, :32] == 0).all()
    assert (lse[:, :, :32] == -torch.inf).all()
    assert lse[:, :, 32:].isfinite().all()


def test_a_scale_of_0_is_0_and_nan_goes_on() -> None:
    made = drawn(window=(20, 20))
    zero = torch.zeros(2, 2)
    assert (run(made, v_descale=zero)[0] == 0).all()
    out, lse = run(made, q_descale=zero)  # all scores 0: the mean of what is seen
    assert out.isfinite().all()
    assert torch.allclose(lse.exp().round(), lse.exp(), atol=1e-3)
    out, _ = run(made, k_descale=torch.tensor([[math.nan, 1.0], [1.0, 1.0]]))
    assert out[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()


def test_numbers_beyond_e4m3_do_not_come_up_in_weights() -> None:
    """Weights begin with an offset, and grow by a slack before the output is rescaled."""
    top = math.log2(448)
    assert top > OFFSET
    assert top > OFFSET_IF_NEEDED + SLACK_8
    needed = replace(OPERATION, sums="fast")
    text = render(KernelSpec("sm_90a", needed, replace(SCHEDULE, rescale="needed")))
    (offset,), (slack,) = (re.findall(rf"{name} = (\d+);", text) for name in ("kOffset", "kSlack"))
    assert int(offset) + int(slack) < top


def test_a_compiler_sees_one_operator() -> None:
    made = drawn()
    scales = {name: made.keywords[name] for name in ("q_descale", "k_descale", "v_descale")}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, k, v, causal="bottom_right", **scales)

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(made.q, made.k, made.v), attend(made.q, made.k, made.v))


# ---- Kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dim": 32}, "dim 32 with scores e4m3: must be one of 64, 96, 128, 256"),
        ({"dim": 256}, "sums promoted with dim 256: takes more registers than there are"),
        ({"scores": "same"}, "weights e4m3 with scores same: is of q and k of 8 bits"),
        ({"weights": "same", "sums": "fast"}, "sums fast with weights same: is of weights of e4m3"),
        ({"scales": "blocks", "lengths": "packed"}, "scales blocks with lengths packed"),
        ({"alibi": True}, "alibi with scores e4m3: no kernel has both"),
        ({"dropout": True}, "dropout with scores e4m3: no kernel has both"),
        ({"blocks": True}, "blocks with scores e4m3: no kernel has both"),
        ({"scores": "fp8"}, "scores 'fp8': must be one of same, e4m3, int8"),
    ],
)  # fmt: skip
def test_an_operation_that_no_kernel_has_says_why(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecificationError, match=re.escape(reason)):
        KernelSpec("sm_90a", replace(OPERATION, **fields), SCHEDULE)


@pytest.mark.parametrize(
    ("operation", "schedule", "reason"),
    [
        ({}, {"rescale": "needed"}, "rescale needed with sums promoted: adding the product"),
        ({}, {"kv_tile": 80}, "kv_tile 80: must be a positive multiple of 32"),
        ({"dim": 64}, {"kv_tile": 224}, "kv_tile 224 with scores e4m3: takes more registers"),
        ({"scales": "blocks"}, {"kv_tile": 96}, "kv_tile 96: must divide 128, the keys of a scale"),
        ({"lengths": "packed"}, {"kv_tile": 96}, "kv_tile 96: must divide 128"),
        ({}, {"kv_tile": 160}, "registers expected"),
        ({}, {"overlap": True}, "overlap with scores e4m3: kernels of 8 bits have the next scores"),
    ],
)
def test_a_schedule_that_does_not_fit_says_why(
    operation: dict[str, Any], schedule: dict[str, Any], reason: str
) -> None:
    reasons = FAMILY.reasons(
        KernelSpec("sm_90a", OPERATION, SCHEDULE).architecture,
        replace(OPERATION, **operation),
        replace(SCHEDULE, **schedule),
    )
    assert any(one.startswith(reason) or reason in one for one in reasons)


def test_v_is_mapped_dim_major_and_packed_sequences_with_their_gaps() -> None:
    strides = (1 << 20, 128, 1024)
    problem = AttentionProblem(
        *(3, 8, 2, 300, 500, 128, 300, 500), strides, strides, (65536 * 2, 65536, 512), strides
    )
    fixed = FAMILY.launches(KernelSpec("sm_90a", OPERATION, SCHEDULE), problem, H200)[0]
    v = fixed.parameters["v_map"]
    assert isinstance(v, TensorMap)
    assert (v.extents, v.box) == ((512, 128, 2, 3), (128, 128, 1, 1))
    assert v.pitches == (512, 65536, 65536 * 2)
    packed_spec = KernelSpec("sm_90a", replace(OPERATION, lengths="packed"), SCHEDULE)
    problem = replace(problem, strides_v=(0, 1 << 17, 1 << 10))
    v = FAMILY.launches(packed_spec, problem, H200)[0].parameters["v_map"]
    assert isinstance(v, TensorMap)
    assert v.extents == (padded_total(500, 3), 128, 2, 1)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192, 256])
def test_every_dim_has_a_kernel_and_sums_are_promoted_to_128(dim: int) -> None:
    choice = warploom.explain(
        *(torch.empty(1, 2, 64, dim, dtype=E4M3, device="meta") for _ in range(3)),
        **{f"{name}_descale": torch.empty(1, 2, device="meta") for name in "qkv"},
        gpu="NVIDIA H200",
    )
    assert ("sums_fast" in str(choice)) == (dim > 128)


# ---- What is refused -----------------------------------------------------------------------------

Refused = Callable[[Drawn], dict[str, Any]]
ERRORS: dict[str, tuple[Refused, str]] = {
    "no scales": (lambda made: {"k_descale": None}, "without k_descale"),
    "no scale of v": (lambda made: {"v_descale": None}, "without v_descale"),
    "scales of another shape": (
        lambda made: {"q_descale": torch.ones(2, 4)},
        r"q_descale \[2, 4\].*must be fp32 \[2, 2\] or \[2, 4, 37\]",
    ),
    "scales of blocks of another size": (
        lambda made: {"k_descale": torch.ones(2, 2, 5)},
        r"k_descale \[2, 2, 5\].*\[2, 2, 3\]",
    ),
    "scales of another type": (
        lambda made: {"v_descale": torch.ones(2, 2).double()},
        "v_descale .*float64",
    ),
    "scales elsewhere": (
        lambda made: {"v_descale": torch.ones(2, 2, device="meta")},
        "v_descale on meta",
    ),
    "v of int8": (lambda made: {"v": made.v.view(torch.int8)}, "v torch.int8.*must be e4m3"),
    "k of another type": (lambda made: {"k": made.k.view(torch.int8)}, "both be e4m3.*both int8"),
    "q of 16 bits": (lambda made: {"q": made.q.bfloat16()}, "must both be e4m3"),
    "a layout that there is not": (lambda made: {"v_layout": "rows"}, "v_layout 'rows'"),
    "v by keys said to be dim-major": (
        lambda made: {"v_layout": "dim_major"},
        r"v \[2, 2, 300, 64\].*\[2, 2, 64, at least 304\]",
    ),
    "sums that there are not": (lambda made: {"sums": "exact"}, "sums 'exact'"),
    "an output of fp32": (lambda made: {"out_dtype": torch.float32}, "out_dtype"),
    "sinks of e4m3": (
        lambda made: {"sinks": torch.zeros(4).to(E4M3)},
        "sinks .* torch.float8_e4m3fn .*float32",
    ),
    "slopes": (lambda made: {"alibi_slopes": torch.zeros(4)}, "alibi with scores e4m3"),
    "dropout": (lambda made: {"dropout_p": 0.5}, "dropout with scores e4m3"),
    "gradients": (
        lambda made: {"q_descale": torch.ones(2, 2, requires_grad=True)},
        "requires grad.*not differentiable",
    ),
}


@pytest.mark.parametrize(("change", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_input_is_named(change: Refused, message: str) -> None:
    made = drawn()
    operands = {"q": made.q, "k": made.k, "v": made.v, **made.keywords, **change(made)}
    with pytest.raises(ProblemError, match=re.compile(message, re.S)):
        warploom.attention(**operands)


def test_other_dims_and_blocks_of_masks_are_named() -> None:
    made = drawn(dim=24)
    with pytest.raises(ProblemError, match=r"dim 24.*multiple of 16"):
        run(made)
    with pytest.raises(ProblemError, match="8 bits with q_descale"):
        warploom.attention(made.q, made.k, made.v)
    with pytest.raises(ProblemError, match="block_mask"):
        run(made, block_mask=object())
    made = drawn(dim=256)
    with pytest.raises(ProblemError, match="sums promoted with dim 256"):
        run(made, sums="promoted")


def test_a_plan_of_8_bits_is_refused() -> None:
    q = torch.randn(1, 1, 16, 64).to(E4M3)
    scale = torch.ones(1, 1)
    with pytest.raises(warploom.ProblemError, match="a plan with k_descale, q_descale: must be of"):
        warploom.plan_attention(q, q, q, q_descale=scale, k_descale=scale)


@pytest.mark.parametrize("scores", ["e4m3", "int8"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_operands_that_are_drawn_saturate(
    scores: str, sign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a NaN in the tuner's operands: one of 10^9 normal numbers is beyond 6.2."""
    monkeypatch.setattr(
        EightBitTrial, "queries", lambda self: AttentionTrial.queries(self).fill_(sign * 9.0)
    )
    monkeypatch.setattr(
        EightBitTrial, "keys", lambda self: AttentionTrial.keys(self).fill_(sign * 9.0)
    )
    operation = replace(OPERATION, scores=scores, scales="blocks" if scores == "int8" else "heads")
    trial = EightBitTrial(operation, AttentionShape(1, 1, 1, 16, 16, 128), "cpu", 0)
    one = trial.sets[0]
    assert all(operand.float().isfinite().all() for operand in (one.q, one.k, one.v))
