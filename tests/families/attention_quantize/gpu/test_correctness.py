"""Every bit against torch, and means against float64, over sizes that no tile divides."""

from __future__ import annotations

import attention_quantize_cases as cases
import pytest
import torch
from attention_quantize_cases import short

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.attention_forward.values import by_keys, dim_major
from warploom.runtime.families.attention_quantize.api import dequantize, transpose_values
from warploom.runtime.sampled import differ

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
E4M3 = torch.float8_e4m3fn
# batch, heads, kv_heads, seq_q, seq_k: one row; a tile, less 1 and more; shared heads; many heads.
SIZES = [
    (1, 1, 1, 1, 1),
    (2, 4, 2, 37, 200),
    (1, 8, 1, 128, 128),
    (1, 2, 2, 129, 127),
    (3, 3, 3, 257, 256),
    (2, 6, 3, 300, 257),
    (1, 2, 1, 5, 5000),
    (2, 2, 2, 0, 130),
    (40, 8, 8, 3, 130),
]


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_bit_is_right(kernel: KernelSpec, sizes: tuple[int, ...]) -> None:
    cases.made(kernel, *sizes).verify()
    cases.made(kernel, *sizes, pad=16, mean=3.0).verify()


@pytest.mark.parametrize("sizes", [(16, 16, 16, 1024, 1024), (1, 16, 16, 4096, 16384)], ids=str)
@pytest.mark.parametrize("kernel", cases.SMOKE, ids=short)
def test_large_sizes(kernel: KernelSpec, sizes: tuple[int, ...]) -> None:
    """Many tiles, which are held against torch on the same GPU."""
    cases.made(kernel, *sizes).verify()


@pytest.mark.parametrize("threads", [128, 256, 512])
def test_ctas_of_any_size_have_the_same_bits_but_for_sums(threads: int) -> None:
    cases.made(cases.threads(cases.spec(), threads), 2, 4, 2, 300, 1031).verify()


@pytest.mark.parametrize("scores", ["int8", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_rounded_as_the_reference_rounds_it(
    dtype: torch.dtype, scores: str
) -> None:
    """All of bf16 and of fp16 in q and v, finite and not, in rows of one exponent and of all."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    near, mixed = bits.view(1, 1, 1024, 64), bits.view(64, 1024).t().reshape(1, 1, 1024, 64)
    finite = torch.where(mixed.isfinite(), mixed, 1.0)
    for rows in (near, mixed.contiguous(), finite):
        given = rows, torch.zeros_like(rows), rows
        right = warploom.attention_quantize(*given, scores=scores, smooth=False)
        there = (one.cuda() for one in given)
        found = warploom.attention_quantize(*there, scores=scores, smooth=False)
        for one, other in zip(found[:6], right[:6], strict=True):
            assert not differ(one.cpu(), other).any()


@pytest.mark.parametrize("scores", ["int8", "e4m3"])
@pytest.mark.parametrize("value", [0.0, 2.0**-133, 3e38, torch.inf, torch.nan])
def test_scales_of_what_is_zero_tiny_huge_or_not_finite(value: float, scores: str) -> None:
    """Bit for bit those of the reference, whatever the largest magnitude is."""
    for whole in (False, True):
        q, k, v = (torch.zeros(1, heads, 300, 64).bfloat16() for heads in (4, 2, 2))
        for one in (q, k, v):
            place = one if whole else one[:, 1, 200:201, 5]
            place.fill_(value)
        right = warploom.attention_quantize(q, k, v, scores=scores, smooth=False)
        there = (one.cuda() for one in (q, k, v))
        found = warploom.attention_quantize(*there, scores=scores, smooth=False)
        for one, other in zip(found[:6], right[:6], strict=True):
            assert not differ(one.cpu(), other).any()


def test_nan_and_infinity_in_k_reach_their_head_alone() -> None:
    for scores in ("int8", "e4m3"):
        q, k, v = (torch.randn(2, heads, 300, 64, device="cuda").bfloat16() for heads in (4, 2, 2))
        usual = warploom.attention_quantize(q, k, v, scores=scores)
        k[0, 1, 17, 3], k[1, 0, 299, 9] = torch.nan, torch.inf
        found = warploom.attention_quantize(q, k, v, scores=scores)
        assert found.k_mean is not None and found.score_shift is not None
        assert usual.k_mean is not None and usual.score_shift is not None
        assert found.k_mean[0, 1, 3].isnan() and found.k_mean[1, 0, 9] == torch.inf
        scale = found.k_descale.repeat_interleave(128, 2)[:, :, :300, None]
        keys = found.k.float() * scale
        assert keys[0, 1, :, 3].isnan().all() and keys[1, 0, :, 9].isnan().all()
        assert found.score_shift[0, 2:].isnan().all()
        for batch, head in ((0, 0), (1, 1)):
            assert torch.equal(found.k[batch, head].float(), usual.k[batch, head].float())
            assert torch.equal(found.k_mean[batch, head], usual.k_mean[batch, head])
        assert torch.equal(found.score_shift[0, :2], usual.score_shift[0, :2])
        assert not differ(found.v, usual.v).any()


def test_a_plain_v_is_transposed_byte_for_byte() -> None:
    for sizes in ((1, 1, 1, 32), (2, 3, 300, 96), (1, 4, 1031, 128), (1, 2, 256, 256)):
        codes = torch.randint(0, 256, sizes, dtype=torch.uint8, device="cuda")
        found = transpose_values(codes.view(E4M3))
        right = dim_major(codes.view(E4M3))
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))
        back = by_keys(found, sizes[2])
        assert torch.equal(back.view(torch.uint8), codes)


def test_packed_sequences_of_a_plain_v_are_transposed_by_one_launch() -> None:
    """Ragged and empty sequences, and offsets past the rows, which no host reads."""
    v = torch.randint(0, 256, (1000, 3, 80), dtype=torch.uint8, device="cuda").view(E4M3)
    for offsets in ([0, 130, 130, 131, 400, 1000], [0, 999], [0, 0, 0], [0, 300, 5000]):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        transpose_values(v, cu_seqlens)
        before = warploom.counters.launches
        found = transpose_values(v, cu_seqlens)
        assert warploom.counters.launches - before == 1
        right = dim_major(v, cu_seqlens.clamp(max=1000))
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.usefixtures("memory")
def test_past_2_to_the_31_elements_rows_are_read_and_written() -> None:
    keys = (1 << 23) + 200
    v = torch.ones(1, 1, 1, 256, device="cuda").to(E4M3).expand(1, 1, keys, 256).contiguous()
    v[..., -1, :] = torch.full((256,), 3.0, device="cuda").to(E4M3)
    found = transpose_values(v)
    last = by_keys(found[..., -256:].contiguous(), 200)
    assert (last[0, 0, -1].float() == 3).all() and (last[0, 0, :-1].float() == 1).all()
    assert (found[0, 0, :, :-256].view(torch.uint8) == v[0, 0, 0, 0].view(torch.uint8)).all()


def test_attention_of_what_is_quantized_is_near_attention() -> None:
    """By torch in float32: outputs, and log-sum-exps with what smoothing took from scores."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 700, 128, device="cuda") for heads in (8, 2, 2))
    k, v = k + 10 * torch.randn(2, 1, 128, device="cuda"), v + 1
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()

    def attended(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, keys, values = given
        keys, values = keys.repeat_interleave(4, 1), values.repeat_interleave(4, 1)
        scores = query @ keys.mT * 128**-0.5
        return scores.softmax(-1) @ values, scores.logsumexp(-1)

    right, right_lse = attended(q.double(), k.double(), v.double())
    found = warploom.attention_quantize(q, k, v)
    assert found.score_shift is not None
    out, lse = attended(*dequantize(found, 700, torch.float64))
    lse = lse + 128**-0.5 * found.score_shift
    assert (out - right).norm() < 0.01 * right.norm()
    assert (lse - right_lse).abs().max() < 0.2
