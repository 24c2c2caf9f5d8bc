"""Operands and results of shapes and types that a call takes as they are, where a GPU shows it."""

from __future__ import annotations

import pytest
import torch

import warploom
from warploom.generator.specification import parse_name

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
M, N, K = 64, 96, 256


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """A [M, K], and B [K, N] as a weight [N, K] transposed."""
    return rand(M, K), rand(N, K, seed=1).t()


def test_autocast_lowers_operands_and_no_reference() -> None:
    a, b = operands()
    expected = warploom.gemm(a, b)
    empty = {"bias": torch.randn(N, device="cuda"), "out_dtype": torch.float32}
    bias = warploom.gemm(a[:, :0], b[:0], **empty)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(warploom.gemm(a.float(), b.float()), expected)
        assert torch.equal(warploom.gemm(a[:, :0], b[:0], **empty), bias)


@pytest.mark.parametrize("first", [96, 100, 101])  # of the columns: 101 is odd, and stored directly
def test_a_product_goes_into_columns_of_a_buffer_and_nowhere_else(first: int) -> None:
    a, (_, b) = rand(3, 33, K), operands()
    room = torch.full((5, 33, 320), -1, dtype=torch.int16, device="cuda")
    out = room.view(torch.bfloat16)[1:4, :, first : first + N]
    copies = warploom.counters.copies
    assert warploom.gemm(a, b, out=out) is out
    assert warploom.counters.copies == copies
    assert torch.allclose(out.float(), a.float() @ b.float(), rtol=2e-2, atol=1e-1)
    room[1:4, :, first : first + N] = -1
    assert (room == -1).all()


NATURAL: dict[str, tuple[tuple[int, ...], ...]] = {
    "one for all batches": ((M,), (N,), (N,), (M, N)),
    "one for each batch": ((2, 3, M), (2, 3, N), (2, 3, N), (2, 3, M, N)),
    "as torch._scaled_mm": ((M, 1), (1, N), (N,), (M, N)),
    "flat rows": ((6 * M,), (N,), (N,), (6 * M, N)),
}


@pytest.mark.parametrize("case", NATURAL)
def test_operands_of_the_epilogue_have_natural_shapes(case: str) -> None:
    row, column, bias, residual = (rand(*shape).float() for shape in NATURAL[case])
    a, (_, b) = rand(2, 3, M, K), operands()
    keywords = {"scale_a": row, "scale_b": column, "bias": bias, "residual": residual}
    copies = warploom.counters.copies
    found = warploom.gemm(a, b, **keywords, out_dtype=torch.float32)
    assert warploom.counters.copies == copies
    expected = warploom.gemm(
        a.cpu(),
        b.cpu(),
        **{name: value.cpu() for name, value in keywords.items()},
        out_dtype=torch.float32,
    )
    assert torch.allclose(found.cpu(), expected, rtol=1e-4, atol=1e-2)
    kernel = parse_name(warploom.explain(a, b, **keywords, out_dtype=torch.float32).kernel)
    assert kernel.operation.batched is (case != "flat rows")  # type: ignore[union-attr]
