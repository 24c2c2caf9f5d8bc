"""Scales of blocks of D: what a call fills and returns, what it refuses, and what is rendered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import Bias, Gate, Quantize, Residual, Scale
from warploom.generator.families.gemm import (
    Accumulation,
    GemmOperation,
    GemmSchedule,
    GemmShape,
    complete,
)
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm import operators, reference
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.samples import GemmData

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KINDS = ("quantize", "quantize_pow2")


def scales_for(rows: int, n: int, padded: int = 0) -> torch.Tensor:
    """Scales with rows next to each other, as torch's scaled_mm takes them."""
    return torch.full((-(-n // 128), rows + padded), torch.nan).t()[:rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "gated"), [(256, False), (200, False), (512, True), (336, True)])
def test_values_times_scales_are_what_there_was(n: int, kind: str, *, gated: bool) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 7, 64).to(BF16), torch.randn(64, n).to(BF16)
    columns = n // 2 if gated else n
    scales = scales_for(21, columns, padded=3)
    listed: list[Any] = [("gate", "silu")] * gated + [(kind, scales)]
    d = warploom.gemm(a, b, epilogue=listed, out_dtype=E4M3)
    x = (a.double() @ b.double()).reshape(21, n)
    if gated:
        gate, up = x.chunk(2, dim=-1)
        x = F.silu(gate) * up
    each = scales.double().repeat_interleave(128, 1)[:, :columns]
    off = (d.double().reshape(21, columns) * each - x).abs()
    assert (off <= x.abs() * 2**-4 + each * 2**-10 + 1e-5).all()
    largest = F.pad(x.abs(), (0, -columns % 128)).unflatten(1, (-1, 128)).amax(-1)
    ratio = scales.double() * 448 / largest
    if kind == "quantize":
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-5, atol=0)
    else:
        assert ((ratio > 0.9999) & (ratio < 2.0001)).all()
        assert (torch.frexp(scales)[0] == 0.5).all()


def test_scales_of_zeros_infinities_and_nan_are_as_in_transformer_engine() -> None:
    a, b = torch.zeros(5, 64).to(BF16), torch.ones(64, 256).to(BF16)
    a[1, 0], a[2, 0], a[3, 0], a[4, 0] = torch.nan, torch.inf, 1e-38, 3e38
    scales = scales_for(5, 256)
    d = warploom.gemm(a, b, epilogue=[("quantize", scales)], out_dtype=E4M3).float()
    assert (scales[:3] == 1).all() and scales.isfinite().all() and (scales > 0).all()
    assert (d[0] == 0).all() and d[1].isnan().all() and (d[2] == 448).all()
    assert (d[4] == 448).all()
    block = torch.zeros(1, 128)
    block[0, :2] = torch.tensor([torch.nan, 2.0])
    scales = scales_for(1, 128)
    one = torch.ones(1, 16).to(BF16)
    rows = torch.zeros(16, 128).to(BF16)
    rows[0] = block[0].to(BF16)
    d = warploom.gemm(one, rows, epilogue=[("quantize", scales)], out_dtype=E4M3).float()
    assert d[0, 0].isnan() and d[0, 1] == 448 and scales.item() == pytest.approx(2 / 448)


def test_scales_cross_the_operator() -> None:
    a, b = torch.randn(4, 64).to(BF16), torch.randn(64, 256).to(BF16)
    expected = scales_for(4, 256)
    d = warploom.gemm(a, b, epilogue=[("quantize", expected)], out_dtype=E4M3)
    compiled = torch.compile(
        lambda a, s: warploom.gemm(a, b, epilogue=[("quantize", s)], out_dtype=E4M3),
        backend="aot_eager",
        fullgraph=True,
    )
    scales = scales_for(4, 256)
    assert torch.equal(compiled(a, scales).view(torch.uint8), d.view(torch.uint8))
    assert torch.equal(scales, expected)
    scales, out = scales_for(4, 256), torch.empty_like(d)
    operators.call(GemmCall(a, b, [("quantize", scales)], out, E4M3, True, None))
    assert torch.equal(scales, expected)


def test_random_calls_are_within_their_bound() -> None:
    for steps in ((Quantize("exact"),), (Bias("bf16"), Gate("silu"), Quantize("pow2"))):
        operation = GemmOperation("bf16", "bf16", "e4m3", epilogue=steps)
        one = GemmData(operation, GemmShape(9, 272, 64), "cpu", 0).operands()
        d = warploom.gemm(one.a, one.b, epilogue=one.listed, out_dtype=E4M3)
        exact, bound = reference.gemm_bound(one.a, one.b, one.listed, E4M3)
        assert ((d.double() - exact).abs() <= bound).all()


def test_what_has_no_scales_of_blocks_is_refused() -> None:
    a, b = torch.zeros(4, 64).to(BF16), torch.zeros(64, 256).to(BF16)
    scales = scales_for(4, 256)
    for listed, dtype, message in (
        ([("quantize", scales)], BF16, "d behind quantize_exact 'bf16': must be e4m3"),
        ([("quantize", scales), ("scale", 2.0)], E4M3, "before other steps: must be the last"),
        ([("quantize", torch.empty(4, 2))], E4M3, r"must be \[4, 2\].*rows next to each other"),
        ([("quantize", torch.empty(3, 4).t())], E4M3, r"must be \[4, 2\]"),
        ([("quantize", scales.double())], E4M3, "must be fp32"),
        ([("quantize", 2.0)], E4M3, "must be a tensor"),
    ):
        with pytest.raises(ProblemError, match=message):
            warploom.gemm(a, b, epilogue=listed, out_dtype=dtype)
    with pytest.raises(ProblemError, match="quantize with a tensor that requires grad"):
        warploom.gemm(a.requires_grad_(), b, epilogue=[("quantize", scales)], out_dtype=E4M3)
    batched = torch.zeros(2, 64, 256).to(BF16)
    with pytest.raises(ProblemError, match="batched with quantize_exact"):
        warploom.gemm(
            a.detach().expand(2, 4, 64),
            batched,
            epilogue=[("quantize", scales_for(8, 256))],
            out_dtype=E4M3,
        )


def spec(
    *steps: Any, kind: str = "bf16", accumulation: Accumulation = "fast", **fields: Any
) -> KernelSpec:
    made: Any = (kind, kind, "e4m3")
    operation = GemmOperation(*made, epilogue=steps, accumulation=accumulation)
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, {"stages": 4, **fields}))


def test_rules_say_which_tiles_have_whole_blocks() -> None:
    one = Quantize("exact")
    for steps, fields, message in (
        ((one,), {"tile": (128, 96, 64)}, "tile n with quantize_exact 96: must be a positive mul"),
        ((Gate("silu"), one), {"tile": (128, 128, 64)}, "positive multiple of 256"),
        (
            (one,),
            {"tile": (128, 128, 64), "swap_ab": True},
            "swap with quantize_exact: must be false",
        ),
        ((one,), {"tile": (128, 128, 64), "split_k": 2}, "split_k 2 with quantize_exact"),
        ((one,), {"tile": (128, 128, 64), "cluster_split_k": 2}, "positive multiple of 256"),
        (
            (Residual("fp32"), Residual("fp32"), Gate("silu"), one),
            {"tile": (128, 256, 64)},
            "16 registers of a fragment: at most 12",
        ),
    ):
        with pytest.raises(SpecificationError, match=message):
            spec(*steps, **fields)
    with pytest.raises(SpecificationError, match="promoted with quantize_exact of a gate"):
        spec(Gate("silu"), one, kind="e4m3", accumulation="promoted", tile=(64, 256, 128))


def test_what_is_rendered_knows_a_block_before_it_stores() -> None:
    text = render(spec(Scale("row"), Quantize("pow2"), tile=(128, 128, 64)))
    assert "Quantize<true> step_1;" in text
    noted = text.index("epilogue.step_1.note(largest")
    assert noted < text.index("epilogue.step_1.inverse(") < text.index("store(p, x, at, chunk);")
    assert "step_1.apply" not in text
    assert isinstance(
        spec(Quantize("exact"), tile=(64, 128, 64), consumers=1).schedule, GemmSchedule
    )
