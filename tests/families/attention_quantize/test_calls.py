"""Calls on the CPU: what they return, what is copied and planned, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom import QuantizedAttention
from warploom.errors import ProblemError
from warploom.generator.families.attention_quantize import AttentionQuantizeShape
from warploom.runtime import plan
from warploom.runtime.families import family
from warploom.runtime.families.attention_forward.values import by_keys
from warploom.runtime.families.attention_quantize.api import dequantize, transpose_values
from warploom.runtime.families.attention_quantize.call import AttentionQuantizeCall
from warploom.runtime.families.attention_quantize.family import FAMILY as RUNTIME
from warploom.runtime.families.attention_quantize.family import placed

E4M3 = torch.float8_e4m3fn
TYPES = {"int8": torch.int8, "e4m3": E4M3}
LARGEST = {"int8": 127.0, "e4m3": 448.0}
STEP = {"int8": 0.0, "e4m3": 2.0**-4}  # the relative error of one rounding
LEAST = {"int8": 0.5, "e4m3": 2.0**-10}  # the absolute one, where that is more
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seq_q: int = 37,
    seq_k: int = 300,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Operands:
    """q, k and v: of k and v, columns have means, and rows are of many sizes."""
    torch.manual_seed(batch + seq_q + seq_k + dim)

    def drawn(heads: int, rows: int, mean: float) -> torch.Tensor:
        sizes = torch.exp2(torch.randint(-6, 6, (batch, heads, rows, 1)).float())
        return sizes * torch.randn(batch, heads, rows, dim) + mean * torch.randn(heads, 1, dim)

    q, k, v = drawn(heads, seq_q, 0.0), drawn(kv_heads, seq_k, 8.0), drawn(kv_heads, seq_k, 1.0)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def each_key(scale: torch.Tensor, keys: int) -> torch.Tensor:
    """The scale of each key, of those of tiles."""
    return scale.repeat_interleave(128, 2)[:, :, :keys, None]


def assert_nearest(
    codes: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor, kind: str
) -> None:
    """Codes times scales are the nearest to what is exact that there are."""
    scaled = exact / scale.double()
    bound = (scaled.abs() * STEP[kind]).clamp(min=LEAST[kind])
    assert ((codes.double() - scaled).abs() <= bound + scaled.abs() * 2.0**-21).all()
    assert scaled.abs().max() <= LARGEST[kind] * (1 + 2.0**-21)


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scores", TYPES)
@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_values_times_scales_are_the_nearest_that_there_are(
    scores: str, smooth: bool, dim: int
) -> None:
    """Against float64, by the scales that are returned: those are of the largest magnitudes."""
    q, k, v = operands(dim=dim)
    found = warploom.attention_quantize(q, k, v, scores=scores, smooth=smooth)
    assert isinstance(found, QuantizedAttention)
    assert found.q.dtype == found.k.dtype == TYPES[scores] and found.v.dtype == E4M3
    assert found.v.shape == (2, 2, dim, 384) and found.k_descale.shape == (2, 2, 3)
    assert_nearest(found.q, found.q_descale[..., None], q.double(), scores)
    exact = k.double()
    if smooth:
        assert found.k_mean is not None
        torch.testing.assert_close(found.k_mean.double(), exact.mean(2), rtol=1e-5, atol=1e-6)
        exact = (k.float() - found.k_mean[:, :, None]).double()
    else:
        assert found.k_mean is None and found.score_shift is None
    assert_nearest(found.k, each_key(found.k_descale, 300), exact, scores)
    values = by_keys(found.v, 300)
    assert_nearest(values, found.v_descale[..., None, None], v.double(), "e4m3")
    for scale, rows, kind in (
        (found.q_descale, q.double().abs().amax(-1), scores),
        (found.k_descale[..., 0], exact[:, :, :128].abs().amax((2, 3)), scores),
        (found.k_descale[..., 2], exact[:, :, 256:].abs().amax((2, 3)), scores),
        (found.v_descale, v.double().abs().amax((2, 3)), "e4m3"),
    ):
        torch.testing.assert_close(scale.double() * LARGEST[kind], rows, rtol=1e-6, atol=0)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def dequantized(found: QuantizedAttention, keys: int) -> Operands:
    """Operands in float64, k less its mean."""
    q, k, v = dequantize(found, keys, torch.float64)
    return q, k, v


def test_smoothing_keeps_attention_and_its_log_sum_exp() -> None:
    """Of k with a mean that is far larger than its spread, where scores are sharp."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, heads, 400, 64) for heads in (4, 2, 2))
    q, k, v = (2 * q).bfloat16(), (k + 20 * torch.randn(2, 1, 64)).bfloat16(), (v + 1).bfloat16()
    right, right_lse = attention(q, k, v)
    errors = {}
    for scores in TYPES:
        for smooth in (True, False):
            found = warploom.attention_quantize(q, k, v, scores=scores, smooth=smooth)
            out, lse = attention(*dequantized(found, 400))
            if found.score_shift is not None:
                lse = lse + 64**-0.5 * found.score_shift.double()
                assert (lse - right_lse).abs().max() < (0.2 if scores == "int8" else 1.0)
            errors[scores, smooth] = float((out - right).norm() / right.norm())
    assert errors["int8", True] < 0.05 and errors["e4m3", True] < 0.15
    for scores in TYPES:
        assert errors[scores, True] < errors[scores, False] / 3
    assert errors["int8", True] < errors["e4m3", True]


def test_slots_of_the_transposed_v_have_the_keys_of_accumulators() -> None:
    """Slot 4 t + u of each 16 keys has key u // 2 * 8 + 2 t + u % 2; past the last are zeros."""
    keys, dim = 150, 32
    v = (torch.arange(keys * dim) % 241 - 120).float().view(1, 1, keys, dim).to(E4M3)
    found = transpose_values(v)
    assert found.shape == (1, 1, dim, 256) and found.is_contiguous()
    for t in range(4):
        for u in range(4):
            slots = found[0, 0, :, 4 * t + u :: 16].float()
            row = u // 2 * 8 + 2 * t + u % 2
            wanted = torch.zeros(dim, 16)
            rows = v[0, 0, row::16].float().mT
            wanted[:, : rows.shape[1]] = rows
            assert torch.equal(slots, wanted)
    assert torch.equal(by_keys(found, keys).float(), v.float())


def test_bytes_of_a_plain_v_stay_what_they_are() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 8, 32).view(E4M3)
    found = by_keys(transpose_values(every), 8)
    assert torch.equal(found.view(torch.uint8), every.view(torch.uint8))


@pytest.mark.parametrize("scores", TYPES)
def test_what_is_zero_has_the_scale_1(scores: str) -> None:
    q, k, v = (torch.zeros_like(one) for one in operands())
    found = warploom.attention_quantize(q, k, v, scores=scores)
    for scale in (found.q_descale, found.k_descale, found.v_descale):
        assert (scale == 1).all()
    for one in (found.q, found.k, found.v, found.k_mean, found.score_shift):
        assert one is not None and (one.float() == 0).all()


def test_keys_that_are_all_the_same_are_zeros_where_they_are_smoothed() -> None:
    q, k, v = operands()
    k = k[:, :, :1].expand(2, 2, 256, 64)
    found = warploom.attention_quantize(q, k, v[:, :, :256])
    assert found.k_mean is not None and torch.equal(found.k_mean, k[:, :, 0].float())
    assert (found.k == 0).all() and (found.k_descale == 1).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scores", TYPES)
def test_what_is_not_finite_reaches_what_shares_its_scale(scores: str, value: float) -> None:
    q, k, v = operands()
    q[0, 1, 5, 3], k[1, 0, 130, 7], v[0, 1, 299, 63] = value, value, value
    found = warploom.attention_quantize(q, k, v, scores=scores, smooth=False)
    q_found, k_found, v_found = dequantized(found, 300)
    assert q_found[0, 1, 5, 3].isnan() and k_found[1, 0, 130, 7].isnan()
    assert v_found[0, 1, 299, 63].isnan()
    if scores == "int8":  # which has no NaN: the scale is
        assert q_found[0, 1, 5].isnan().all() and k_found[1, 0, 128:256].isnan().all()
        q_found[0, 1, 5], k_found[1, 0, 128:256] = 0, 0
    else:
        assert found.q_descale[0, 1, 5] == found.k_descale[1, 0, 1] == 1
        q_found[0, 1, 5, 3], k_found[1, 0, 130, 7] = 0, 0
    assert found.v_descale[0, 1] == 1
    v_found[0, 1, 299, 63] = 0
    for one in (q_found, k_found, v_found):
        assert one.isfinite().all()


def test_a_mean_that_is_not_finite_makes_its_head_so() -> None:
    for scores in TYPES:
        q, k, v = operands()
        k[0, 1, 5, 3] = torch.inf
        found = warploom.attention_quantize(q, k, v, scores=scores)
        _, keys, _ = dequantized(found, 300)
        assert keys[0, 1, :, 3].isnan().all() and found.score_shift is not None
        assert not found.score_shift[0, 2:].isfinite().any()
        assert found.score_shift[0, :2].isfinite().all() and keys[1].isfinite().all()


def test_tiny_and_huge_magnitudes_have_finite_scales() -> None:
    q, k, v = operands(dtype=torch.float16)
    for size in (2.0**-24, 65504.0):
        made = [torch.full_like(one, size) for one in (q, k, v)]
        for scores in TYPES:
            found = warploom.attention_quantize(*made, scores=scores, smooth=False)
            for one, right in zip(dequantized(found, 300), made, strict=True):
                torch.testing.assert_close(one, right.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_q": 0}, {"seq_k": 0}, {"heads": 0}], ids=str)
def test_what_is_empty_has_empty_results(sizes: dict[str, int]) -> None:
    given = operands(**{"batch": 2, **sizes})
    found = warploom.attention_quantize(*given)
    assert found.q.shape == given[0].shape and found.k.shape == given[1].shape
    assert found.v.shape == (*given[2].shape[:2], 64, -(-given[2].shape[2] // 128) * 128)
    assert found.k_mean is not None and found.k_mean.isfinite().all()
    assert found.v_descale.isfinite().all() and found.q_descale.isfinite().all()


def test_under_autocast_operands_are_converted_as_those_of_attention() -> None:
    q, k, v = operands()
    right = warploom.attention_quantize(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        found = warploom.attention_quantize(q.float(), k.float(), v.float())
    for one, other in zip(found, right, strict=True):
        assert one is not None and other is not None
        assert torch.equal(one.float(), other.float())


# ---- Plans ---------------------------------------------------------------------------------------


def test_results_have_the_order_of_dimensions_of_their_operands() -> None:
    whole = torch.randn(2, 37, 8, 64).bfloat16()  # q, k and v of one projection
    q, k, v = (one.transpose(1, 2) for one in whole.split([4, 2, 2], 2))
    found = warploom.attention_quantize(q, k, v, smooth=False)
    assert found.q.stride() == (37 * 4 * 64, 64, 4 * 64, 1)
    assert found.k.stride() == (37 * 2 * 64, 64, 2 * 64, 1)
    dense = (one.contiguous() for one in (q, k, v))
    expected = warploom.attention_quantize(*dense, smooth=False)
    for one, other in zip(found[:6], expected[:6], strict=True):
        assert torch.equal(one.float(), other.float())


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes).bfloat16()


VIEWS = {
    "dense": (lambda: drawn(2, 2, 300, 64), ()),
    "rows before heads": (lambda: drawn(2, 300, 2, 64).transpose(1, 2), ()),
    "part of a row": (lambda: drawn(2, 2, 300, 96)[..., 8:72], ()),
    "one row for all": (lambda: drawn(1, 1, 1, 64).expand(2, 2, 300, 64), ()),
    "an address between": (lambda: drawn(2, 2, 300, 96)[..., 3:67], ("k",)),
    "columns before rows": (lambda: drawn(2, 2, 64, 300).mT, ("k",)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_only_rows_that_16_bytes_do_not_reach_are_copied(name: str) -> None:
    make, copied = VIEWS[name]
    plan.forget()
    (q, _, v), k = operands(), make()
    found = warploom.attention_quantize(q, k, v, smooth=False)
    (planned,) = plan.known.values()
    assert planned.copies == copied
    expected = warploom.attention_quantize(q, k.contiguous(), v, smooth=False)
    for one, other in zip(found[:6], expected[:6], strict=True):
        assert torch.equal(one.float(), other.float())


def test_a_call_is_explained_for_a_gpu_that_is_not_here() -> None:
    given = (one.to("meta") for one in operands(dim=128))
    told = warploom.explain(warploom.attention_quantize, *given, gpu="h200")
    name = "attention_quantize_sm90a_bf16_d128_scores_int8_smooth_threads"
    assert told.kernel.startswith(name)


def test_a_trial_holds_every_result() -> None:
    runtime = family("attention_quantize")
    for scores in TYPES:
        q, k, v = operands()
        call = AttentionQuantizeCall(v, q, k, scores)
        spec = call.draft(plan.targets.at_hand(-1)).choice.spec
        trial = runtime.trial(spec.operation, AttentionQuantizeShape(2, 4, 2, 37, 300), "cpu", 1)
        assert trial.error_share(spec) <= 1 and len(trial.results) == 8
        for result in trial.results:
            bits = result.view(torch.uint8 if result.dtype.itemsize == 1 else torch.int32)
            place = bits[(0,) * bits.dim()]
            before = place.clone()
            place ^= 1 if bits.dtype == torch.uint8 or result.dim() < 3 else 1 << 20
            assert trial.held_share() > 1
            place.copy_(before)
        assert trial.held_share() <= 1


def test_a_share_tells_what_is_missing() -> None:
    q, k, v = operands()
    call = placed(AttentionQuantizeCall(v, q, k))
    results = plan.run(call)
    assert RUNTIME.share(results, call) <= 1
    assert RUNTIME.share((None, *RUNTIME.results(call)[1:]), call) > 1


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"q": [1.0]}, "must be a torch tensor"),
        ({"k": None}, "must both be there"),
        ({"v": None}, "must be a torch tensor"),
        ({"q": torch.zeros(37, 4, 64)}, "varlen sequences are not quantized"),
        ({"k": torch.zeros(2, 2, 301, 64).bfloat16()}, "k and v must have one shape"),
        ({"q": torch.zeros(2, 4, 37, 96).bfloat16()}, "the batch and dim of q"),
        ({"q": torch.zeros(2, 3, 37, 64).bfloat16()}, "a multiple of those of k and v"),
        ({"q": torch.zeros(2, 4, 37, 64).half()}, "must have one type, float16 or bfloat16"),
        ({"v": torch.zeros(2, 2, 300, 64).to(E4M3)}, "must have one type"),
        ({"scores": "fp8"}, 'must be "int8" or "e4m3"'),
        ({"scores": torch.int8}, 'must be "int8" or "e4m3"'),
        ({"smooth": 1}, "must be True or False"),
        ({"q": torch.zeros(2, 4, 37, 64).bfloat16().requires_grad_()}, "not differentiable"),
        ({"spec": "gemm_sm90a_bf16_128x256x64_cluster2x1_stages4_c2b9e29c"}, "another operation"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(wrong: dict[str, Any], rule: str) -> None:
    given = dict(zip("qkv", operands(), strict=True))
    with pytest.raises(ProblemError, match=rule):
        warploom.attention_quantize(**{**given, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [16, 80, 288])
def test_dimensions_are_multiples_of_32_up_to_256(dim: int) -> None:
    with pytest.raises(ProblemError, match="a multiple of 32 up to 256"):
        warploom.attention_quantize(*operands(dim=dim))


def test_v_alone_is_e4m3() -> None:
    with pytest.raises(ProblemError, match=r"alone: must be torch\.float8_e4m3fn"):
        transpose_values(torch.zeros(1, 1, 8, 64).bfloat16())
    with pytest.raises(ProblemError, match="a multiple of 16"):
        transpose_values(torch.zeros(1, 1, 8, 24).to(E4M3))


@pytest.mark.parametrize(
    ("v", "offsets", "said"),
    [
        (torch.zeros(8, 1, 64), torch.zeros(2), r"cu_seqlens \[2\].*int32"),
        (torch.zeros(8, 1, 64), torch.zeros(2, 1).int(), "contiguous"),
        (torch.zeros(1, 1, 8, 64), torch.zeros(2).int(), r"v alone, \[total, kv_heads, dim\]"),
        (torch.zeros(8, 1, 64), None, "varlen sequences are not quantized"),
    ],
)
def test_offsets_of_v_alone_are_int32(
    v: torch.Tensor, offsets: torch.Tensor | None, said: str
) -> None:
    with pytest.raises(ProblemError, match=said):
        transpose_values(v.to(E4M3), offsets)


# ---- The operator --------------------------------------------------------------------------------


def test_torch_finds_no_fault_with_the_operator() -> None:
    q, k, v = operands(seq_q=5, seq_k=130)
    operator = torch.ops.warploom.attention_quantize.default
    torch.library.opcheck(operator, (v, q, k, "int8", True, None))
    torch.library.opcheck(operator, (v, q, k, "int8", False, None))


def test_compiled_code_calls_the_operator() -> None:
    def lse_shift(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        found = warploom.attention_quantize(q * 2, k, v)
        assert found.score_shift is not None
        return [found.q.float() * found.q_descale[..., None], found.score_shift + 1, found.v]

    given = operands()
    compiled = torch.compile(lse_shift, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(*given), lse_shift(*given), strict=True):
        assert torch.equal(found.float(), expected.float())


def test_fake_tensors_get_what_calls_return() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Batches of a head are neighbours in memory.
    real = [one.transpose(0, 1).contiguous() for one in operands()]
    expected = warploom.attention_quantize(*(one.transpose(0, 1) for one in real))
    for smooth in (True, False):
        with FakeTensorMode() as mode:
            given = (mode.from_tensor(one).transpose(0, 1) for one in real)
            found = warploom.attention_quantize(*given, smooth=smooth)
        for one, wanted in zip(found[:6], expected[:6], strict=True):
            assert (one.shape, one.stride(), one.dtype) == (
                wanted.shape,
                wanted.stride(),
                wanted.dtype,
            )
        assert (found.k_mean is None) is not smooth
