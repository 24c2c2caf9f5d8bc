"""Strassen's algorithm on a GPU: every element, the same bits in every run, nothing beside D."""

from __future__ import annotations

import pytest
import torch
from gemm_strassen import Case, operands

import warploom
from warploom.runtime.families.gemm import strassen
from warploom.runtime.families.gemm.strassen import LEVELS, error_share

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = [
    (Case((1024, 1024, 1024), BF16, BF16), "row_col"),
    (Case((768, 1280, 2048), FP16, FP32), "row_row"),
    (Case((1051, 999, 2040), BF16, FP32), "row_col"),
    (Case((520, 1040, 1047), FP16, FP16), "row_col"),
    (Case((512, 768, 1024), BF16, FP16), "col_row"),
]


@pytest.mark.parametrize("algorithm", LEVELS)
@pytest.mark.parametrize(("case", "layouts"), CASES, ids=str)
def test_result_is_that_of_the_algorithm(algorithm: str, case: Case, layouts: str) -> None:
    a, b = operands(case, "cuda", layouts)
    m, n, _ = case.shape
    room = torch.full((m + 16, n + 24), float("nan"), dtype=case.out, device="cuda")
    out = room[8 : m + 8, 8 : n + 8]
    with torch.no_grad():
        warploom.gemm(a, b, out=out, algorithm=algorithm)
        assert error_share(out, a, b, LEVELS[algorithm]) <= 1
        first = out.clone()
        for _ in range(3):
            out.fill_(float("nan"))
            warploom.gemm(a, b, out=out, algorithm=algorithm)
            assert torch.equal(out, first)
    out.fill_(float("nan"))
    assert room.isnan().all()


@pytest.mark.parametrize("name", strassen._SUMS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("turned", [False, True])
def test_sums_have_the_bits_of_the_reference(name: str, dtype: torch.dtype, turned: bool) -> None:
    x = torch.randn(520, 768, device="cuda").to(dtype)
    x[0, 0], x[1, 400], x[300, 5] = float("inf"), float("nan"), 6e4
    (x11, x12), (x21, x22) = strassen._quarters(x.t() if turned else x, *_half(x, turned))
    quarters = (x11, x12, x21, x22)
    expected = strassen.sums(name, tuple(one.cpu() for one in quarters))  # type: ignore[arg-type]
    for one, right in zip(strassen.sums(name, quarters), expected, strict=True):
        torch.testing.assert_close(one.cpu(), right, rtol=0, atol=0, equal_nan=True)
        assert one.stride() == (1, one.shape[0]) if turned else one.is_contiguous()


def _half(x: torch.Tensor, turned: bool) -> tuple[int, int]:
    rows, columns = (extent // 2 for extent in x.shape)
    return (columns, rows) if turned else (rows, columns)


@pytest.mark.parametrize("algorithm", LEVELS)
def test_epilogue_and_gradients(algorithm: str) -> None:
    a, b = operands(Case((512, 768, 1024), BF16, BF16), "cuda", "row_col")
    bias = torch.randn(768, device="cuda")
    residual = torch.randn(512, 768, device="cuda")
    epilogue = [("bias", bias), ("residual", residual, -0.5)]
    with torch.no_grad():
        product = warploom.gemm(a, b, out_dtype=FP32, algorithm=algorithm)
        d = warploom.gemm(a, b, epilogue=epilogue, out_dtype=FP32, algorithm=algorithm)
        total = residual.clone()
        warploom.gemm(a, b, out=total, residual=total, algorithm=algorithm)
    torch.testing.assert_close(d, product + bias - 0.5 * residual, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(total, product + residual, rtol=1e-5, atol=1e-4)
    tensors = [one.requires_grad_() for one in (a, b, bias, residual)]
    incoming = torch.randn(512, 768, device="cuda").to(BF16)
    results = [warploom.gemm(a, b, epilogue=epilogue, algorithm=how) for how in (algorithm, None)]
    found, expected = (torch.autograd.grad(one, tensors, incoming) for one in results)
    assert all(map(torch.equal, found, expected))


def test_captures_and_compilers_run_the_same() -> None:
    a, b = operands(Case((512, 768, 1024), BF16, BF16), "cuda", "row_col")
    with torch.no_grad():
        eager = warploom.gemm(a, b, algorithm="strassen")
        out, graph = torch.empty_like(eager), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            warploom.gemm(a, b, out=out, algorithm="strassen")
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)
        compiled = torch.compile(warploom.gemm, fullgraph=True)
        assert torch.equal(compiled(a, b, algorithm="strassen"), eager)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            beside = warploom.gemm(a, b, algorithm="strassen")
        torch.cuda.current_stream().wait_stream(other)
        assert torch.equal(beside, eager)
