"""RMSNorm through two epilogues of products with packed weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warploom
from warploom.errors import ProblemError
from warploom.generator.epilogue import MeanSquare, Residual, RmsScale
from warploom.generator.families.mixed_gemm import (
    FAMILY,
    MixedGemmOperation,
    MixedGemmShape,
    mixed_gemm_layout,
)
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.mixed_gemm import reference
from warploom.runtime.families.mixed_gemm.samples import draw

BF16 = torch.bfloat16


def packed(n: int, k: int, norm: torch.Tensor | None = None) -> tuple[Any, torch.Tensor]:
    """A packed weight, and what it stands for; with a norm's weight multiplied in before."""
    w = torch.randn(n, k)
    w = w if norm is None else w * norm
    weight = warploom.quantize(w.to(BF16), "int4", group=64)
    return weight, weight.dequantize(torch.float32).double()


@pytest.mark.parametrize("rows", [(1,), (2, 3), (17,)])
def test_two_gemms_compute_a_layer_with_its_norm(rows: tuple[int, ...]) -> None:
    """The norm's factor is that of exact D, within 1e-5 of each sum that torch's matmul returns.

    The order in which torch adds up depends on the CPU: its sums are compared with float64 by how
    many additions they have. A factor by squares of D after its rounding, or of another row,
    exceeds 1e-5.
    """
    torch.manual_seed(0)
    n, count = 192, torch.Size(rows).numel()
    norm = torch.rand(n) + 0.5
    (o, exact_o), (up, exact_up) = packed(n, 64), packed(96, n, norm)
    h, x = torch.randn(*rows, 64).to(BF16), torch.randn(*rows, n).to(BF16)
    if len(rows) == 1:
        h, x = h.expand(rows[0], 64), x.expand(rows[0], n)
    shares = torch.full((count, 12), torch.nan)
    d = warploom.mixed_gemm(h, o, epilogue=[("residual", x, 1.0), ("mean_square", shares)])
    y = warploom.mixed_gemm(d, up, epilogue=[("rms_scale", shares, 1e-6)], out_dtype=torch.float32)
    mean = (x.double() + h.double() @ exact_o.t()).square().mean(-1)
    torch.testing.assert_close(shares.double().sum(-1), mean.reshape(count), rtol=1e-5, atol=0)
    sums = warploom.mixed_gemm(d, up, out_dtype=torch.float32).double()
    wrong = (sums - d.double() @ exact_up.t()).abs()
    assert (wrong <= 2.0**-24 * n * (d.double().abs() @ exact_up.abs().t())).all()
    expected = sums * (mean + 1e-6).rsqrt()[..., None]
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=0)
    of_torch = F.rms_norm(d.float(), (n,), None, 1e-6).double() @ exact_up.t()
    torch.testing.assert_close(y.double(), of_torch, rtol=2**-8, atol=2**-8)


def test_random_calls_are_within_their_bound() -> None:
    for steps in ((Residual("bf16"), MeanSquare()), (RmsScale(),)):
        operation = MixedGemmOperation("bf16", "int4", "bf16", 128, "bf16", epilogue=steps)
        call = draw(operation, MixedGemmShape(9, 136, 256), "cpu", torch.Generator())
        d = warploom.mixed_gemm(call.a, call.weight, epilogue=list(call.listed))
        assert reference.error_share(d, call.a, call.weight, call.listed) <= 1


def test_shares_cross_the_operators() -> None:
    (o, _), (up, _) = packed(192, 64), packed(96, 192)
    h = torch.randn(4, 64).to(BF16)

    def both(h: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        d = warploom.mixed_gemm(h, o, epilogue=[("mean_square", shares)])
        return warploom.mixed_gemm(d, up, epilogue=[("rms_scale", shares, 1e-6)])

    shares, filled = torch.empty(4, 12), torch.full((4, 12), torch.nan)
    expected = both(h, shares)
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(h, filled), expected)
    assert torch.equal(filled, shares)


def test_what_has_no_gradient_is_refused() -> None:
    (o, _), shares = packed(192, 64), torch.ones(4, 4)
    h = torch.randn(4, 64).to(BF16).requires_grad_()
    for listed in ([("rms_scale", shares, 1e-6)], [("mean_square", torch.empty(4, 12))]):
        with pytest.raises(ProblemError, match=f"{listed[0][0]} with a tensor that requires grad"):
            warploom.mixed_gemm(h, o, epilogue=listed)
        with torch.no_grad():
            warploom.mixed_gemm(h, o, epilogue=listed)
        compiled = torch.compile(
            lambda h, listed=listed: warploom.mixed_gemm(h, o, epilogue=listed), backend="aot_eager"
        )
        with pytest.raises(Exception, match=f"{listed[0][0]} with a tensor that requires grad"):
            compiled(h)
    with pytest.raises(ProblemError, match=r"must be \[4, 4\]"):
        warploom.mixed_gemm(h.detach(), o, epilogue=[("rms_scale", torch.ones(4, 12), 1e-6)])


def test_examples_share_no_factors() -> None:
    (o, _), h, shares = packed(192, 64), torch.randn(3, 4, 64).to(BF16), torch.ones(3, 4, 4)
    with pytest.raises(ProblemError, match="rms_scale of shape"):
        torch.func.vmap(
            lambda h, shares: warploom.mixed_gemm(h, o, epilogue=[("rms_scale", shares, 1e-6)])
        )(h, shares)


@pytest.mark.parametrize("split", [1, 2, 4])
def test_there_is_room_for_the_factors_of_all_rows(split: int) -> None:
    """Blocks that share k finish parts of a tile, and each its own: of any of its rows."""
    of = MixedGemmOperation("bf16", "int4", "bf16", 128, "bf16", epilogue=(RmsScale(),))
    fields = {"tile": (16, 64, 256), "multiply": "mma", "scaled": "sums", "cluster_split_k": split}
    schedule = FAMILY.complete("sm_90a", of, {**fields, "consumers": 1})
    assert mixed_gemm_layout(of, schedule).factor_bytes == 16 * 4
    text = render(KernelSpec("sm_90a", of, schedule))
    assert "static_assert(kChunks * kChunkColumns * 1 * sizeof(float) <= sizeof(shared" in text
