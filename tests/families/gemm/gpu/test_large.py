"""Results of more than 2^31 elements: no offset is computed in 32 bits."""

from __future__ import annotations

import gemm_arena as arena
import gemm_cases as cases
import pytest
import torch

import warploom
from warploom.runtime.families.gemm import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
M = 46_337  # prime
ROWS = [0, 1, 127, 128, M // 2, 46_271, 46_336]
GIGABYTES = 30
LARGE = {  # by n % 8
    torch.bfloat16: {0: cases.SIMPLE["tma"], 5: cases.SIMPLE["direct"]},
    torch.int8: {0: cases.TYPES[-2], 5: cases.TYPES[-1]},
}


def inputs(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.cuda.get_device_properties(0).total_memory < GIGABYTES << 30:
        pytest.skip(f"needs {GIGABYTES} GB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(m)
    a = torch.empty(m, k, dtype=dtype, device="cuda")
    b = torch.empty(n, k, dtype=dtype, device="cuda")
    for operand in (a, b):
        arena.fill(operand, generator)
    return a, b.t()


@pytest.mark.parametrize("n", [46_400, 46_349])  # TMA can store the one, not the other
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_a_result_past_2_to_the_31_elements_is_whole(dtype: torch.dtype, n: int) -> None:
    a, b = inputs(M, n, 80, dtype)
    unwritten = torch.nan if dtype == torch.bfloat16 else -1
    d_type = torch.bfloat16 if dtype == torch.bfloat16 else torch.int32
    out = torch.full((M, n), unwritten, dtype=d_type, device="cuda")
    assert out.numel() > 2**31
    warploom.gemm(a, b, out=out, spec=LARGE[dtype][n % 8])
    assert dtype == torch.int8 or out.isfinite().all()
    for row in ROWS:
        bound = reference.gemm_bound(a[row : row + 1], b, [], out.dtype)
        arena.assert_within(out[row : row + 1], *bound)


@pytest.mark.parametrize(("kernel", "n"), [("residual", 46_400), ("residual direct", 46_349)])
def test_a_residual_past_2_to_the_31_elements_is_read_where_it_is(kernel: str, n: int) -> None:
    a, b = inputs(M, n, 80, torch.bfloat16)
    out = torch.zeros(M, n, dtype=torch.bfloat16, device="cuda")
    out += torch.arange(M, device="cuda").remainder(101)[:, None]
    residual = {row: out[row : row + 1].clone() for row in ROWS}
    warploom.gemm(a, b, epilogue=[("residual", out, 0.5)], out=out, spec=cases.SIMPLE[kernel])
    for row in ROWS:
        listed = [("residual", residual[row], 0.5)]
        bound = reference.gemm_bound(a[row : row + 1], b, listed, out.dtype)
        arena.assert_within(out[row : row + 1], *bound)


def test_an_operand_past_2_to_the_31_elements_is_read_where_it_is() -> None:
    m = 1_048_583  # prime; by 2064 columns
    a, b = inputs(m, 8, 2064, torch.int8)
    assert a.numel() > 2**31
    d = warploom.gemm(a, b, spec=cases.TYPES[-2])
    for rows in (slice(0, 300), slice(m // 2, m // 2 + 300), slice(m - 300, m)):
        arena.assert_within(d[rows], *reference.gemm_bound(a[rows], b, [], d.dtype))
