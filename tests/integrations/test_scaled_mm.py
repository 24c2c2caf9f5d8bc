"""`warploom.functional.scaled_mm`: torch's signature, scales as torch lays them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warploom
from warploom.errors import ProblemError

ScalingType: Any = F.ScalingType  # type: ignore[attr-defined]
M, N, K = 48, 256, 640  # 5 blocks of k: torch's scales of 128x128 have 8
DRAWS = torch.Generator().manual_seed(0)
A = torch.randn(M, K, generator=DRAWS).to(torch.float8_e4m3fn)
B = torch.randn(N, K, generator=DRAWS).to(torch.float8_e4m3fn).t()
SCALE_A = torch.rand(M, 5, generator=DRAWS) + 0.5
SCALE_B = torch.rand(2, 5, generator=DRAWS) + 0.5
ROW, BLOCK = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


def padded() -> torch.Tensor:
    """Scales of 128x128 as torch wants them: blocks of k in fours, K-major; the rest is NaN."""
    found = torch.full((2, 8), torch.nan)
    found[:, :5] = SCALE_B
    return found.t()


@pytest.mark.parametrize("of_b", [padded(), SCALE_B.t()], ids=["in fours", "as they are"])
def test_block_scales_are_read_as_torch_lays_them_out(of_b: torch.Tensor) -> None:
    of_a = SCALE_A.t().contiguous().t()
    d = warploom.functional.scaled_mm(A, B, of_a, ROW, of_b, BLOCK)
    assert torch.equal(d, warploom.gemm(A, B, scale_a=SCALE_A, scale_b=SCALE_B))
    again = warploom.functional.scaled_mm(A, B, [of_a], [ROW], [of_b], [BLOCK], output_dtype=None)
    assert again.dtype == A.dtype


def test_both_operands_may_have_scales_of_rows() -> None:
    of_b = torch.rand(N, 5, generator=DRAWS)
    d = warploom.functional.scaled_mm(A, B, SCALE_A, ROW, of_b, ROW)
    assert torch.equal(d, warploom.gemm(A, B, scale_a=SCALE_A, scale_b=of_b))


@pytest.mark.parametrize("scaling", ["RowWise", "TensorWise"])
def test_scales_of_rows_and_tensors_are_those_of_torch(scaling: str) -> None:
    kind = getattr(ScalingType, scaling)
    shapes = ((M, 1), (1, N)) if scaling == "RowWise" else ((1,), (1,))
    of_a, of_b = (torch.rand(shape, generator=DRAWS) for shape in shapes)
    bias = torch.randn(N, generator=DRAWS).bfloat16()
    d = warploom.functional.scaled_mm(A, B, of_a, kind, of_b, kind, bias=bias)
    exact = A.double() @ B.double() * of_a.double() * of_b.double() + bias.double()
    assert (d.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale_b": SCALE_B}, r"must have shape \[5, 2\].*pass it after .t\(\)"),
        ({"scale_a": SCALE_A.t()}, r"must have shape \[48, 5\]"),
        ({"scale_recipe_b": ScalingType.BlockWise1x32}, "Blackwell"),
        ({"scale_recipe_a": BLOCK}, "BlockWise128x128 by BlockWise128x128: must be one of"),
        ({"scale_a": [SCALE_A, SCALE_A]}, "of 2 entries: must be one"),
        ({"swizzle_a": F.SwizzleType.SWIZZLE_32_4_4}, "None or NO_SWIZZLE"),  # type: ignore[attr-defined]
        ({"contraction_dim": [0]}, "must be empty"),
    ],
    ids=str,
)
def test_what_hopper_has_not_is_refused(change: dict[str, Any], said: str) -> None:
    given = {"scale_a": SCALE_A, "scale_recipe_a": ROW, "scale_b": SCALE_B.t()}
    with pytest.raises(ProblemError, match=said):
        warploom.functional.scaled_mm(A, B, **{**given, "scale_recipe_b": BLOCK, **change})
