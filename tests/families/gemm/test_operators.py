"""torch.compile and torch.library see operators that behave as torch expects of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.gemm import operators
from warploom.runtime.families.gemm.call import GemmCall

A = torch.randn(6, 16).bfloat16()
B = torch.randn(8, 16).bfloat16().t()
BIAS, ROW, C = torch.randn(8), torch.rand(6), torch.randn(6, 8).bfloat16()

EPILOGUES: dict[str, list[tuple[Any, ...]]] = {
    "none": [],
    "layer": [("bias", BIAS), ("activation", "gelu_tanh"), ("residual", C, 0.5)],
    "scales": [("scale", 2.0), ("scale", ROW[:1]), ("scale_row", ROW), ("scale_column", BIAS)],
    "quantised": [("amax", torch.full((1,), 1e9)), ("scale", ROW[:1]), ("scale", 2.0)],
    "other order": [("residual", C, 0.0), ("activation", "relu"), ("bias", BIAS), ("scale", 0.5)],
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_an_epilogue_crosses_the_operator_unchanged(name: str) -> None:
    expected = warploom.gemm(A, B, epilogue=EPILOGUES[name])
    assert torch.equal(
        operators.call(GemmCall(A, B, EPILOGUES[name], None, None, True, None)), expected
    )
    out = torch.empty_like(expected)
    assert operators.call(GemmCall(A, B, EPILOGUES[name], out, None, True, None)) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("b", [B, B.expand(2, 16, 8)], ids=["one b", "batches of b"])
@pytest.mark.parametrize("a", [A, A.reshape(2, 3, 16)], ids=["matrix", "batch"])
def test_torch_finds_no_fault_with_the_operators(a: torch.Tensor, b: torch.Tensor) -> None:
    arguments = (a, b, ["bias", "relu", "scale"], [BIAS], [0.5], torch.bfloat16, "fast", None)
    torch.library.opcheck(torch.ops.warploom.gemm.default, arguments)
    into = {"out": torch.empty(torch.matmul(a, b).shape, dtype=torch.bfloat16)}
    torch.library.opcheck(torch.ops.warploom.gemm_out.default, arguments, into)
    with_amax = (a, b, ["amax", *arguments[2]], *arguments[3:])
    into["amax"] = torch.zeros(1)
    torch.library.opcheck(torch.ops.warploom.gemm_out.default, with_amax, into)


def test_torch_compile_takes_every_keyword_without_a_graph_break() -> None:
    def layer(a: torch.Tensor, scale: float) -> torch.Tensor:
        hidden = warploom.gemm(a, B, bias=BIAS, activation="silu", scale_a=scale)
        return warploom.gemm(hidden, B.t(), residual=a, beta=0.5, out_dtype=torch.float32)

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for scale in (1.0, 2.0):
        assert torch.equal(compiled(A, scale), layer(A, scale))


def test_torch_compile_writes_to_out() -> None:
    def into(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, B, out=out) + 1

    compiled = torch.compile(into, fullgraph=True, backend="aot_eager")
    out, expected = torch.zeros(6, 8).bfloat16(), torch.zeros(6, 8).bfloat16()
    assert torch.equal(compiled(A, out), into(A, expected))
    assert torch.equal(out, expected)


def test_torch_compile_guesses_the_type_and_shape_of_the_result() -> None:
    def wide(a: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        d = warploom.gemm(a, B.to(a.dtype))
        return d.shape, d.dtype

    compiled = torch.compile(wide, fullgraph=True, backend="eager")
    for a in (A.reshape(2, 3, 16), A.half(), A.to(torch.int8)):
        assert compiled(a) == wide(a)


def test_a_kernel_can_be_named_inside_torch_compile() -> None:
    name = warploom.explain(A, B).kernel
    compiled = torch.compile(
        lambda a: warploom.gemm(a, B, spec=name), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(A), warploom.gemm(A, B))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_raises_amax_in_place(backend: str) -> None:
    def quantised(
        a: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        d = warploom.gemm(a, B, scale_d=scale, amax=amax, out_dtype=torch.float8_e4m3fn)
        return d.float(), amax * 2  # reads what the call has written

    compiled = torch.compile(quantised, fullgraph=True, backend=backend)
    scale, amax, expected = torch.full((1,), 0.5), torch.zeros(1), torch.zeros(1)
    for a in (A, A * 4):
        assert all(map(torch.equal, compiled(a, scale, amax), quantised(a, scale, expected)))
        assert torch.equal(amax, expected)
    assert amax.item() == pytest.approx((A.double() * 4 @ B.double()).abs().max().item(), rel=1e-6)


def test_more_than_one_amax_is_refused_under_torch_compile() -> None:
    amax = torch.zeros(1)
    with pytest.raises(
        ProblemError, match=r"2 amax under torch.compile: must be one at most: call"
    ):
        operators.call(GemmCall(A, B, [("amax", amax), ("amax", amax)], None, None, True, None))
    assert amax.item() == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_accumulates_a_gradient_in_place(backend: str) -> None:
    def accumulate(x: torch.Tensor, dy: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        warploom.gemm(dy.mT, x, out=grad, residual=grad, out_dtype=torch.float32)
        return grad + 1

    compiled = torch.compile(accumulate, fullgraph=True, backend=backend)
    x, dy = torch.randn(16, 8).bfloat16(), torch.randn(16, 24).bfloat16()
    grad, expected = torch.ones(24, 8), torch.ones(24, 8)
    for _ in range(2):
        assert torch.equal(compiled(x, dy, grad), accumulate(x, dy, expected))
        assert torch.equal(grad, expected)


def test_torch_compile_broadcasts_batches_and_takes_an_accumulation() -> None:
    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(q, k.mT, use_fast_accum=False, scale_a=0.5)

    compiled = torch.compile(scores, fullgraph=True, backend="eager")
    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 1, 5, 16)
    q, k = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
    assert compiled(q, k).shape == (2, 4, 3, 5)
    assert torch.equal(compiled(q, k), scores(q, k))
