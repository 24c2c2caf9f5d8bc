"""torch.compile and torch.library see operators that behave as torch expects of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.runtime import operators

A = torch.randn(6, 16).bfloat16()
B = torch.randn(8, 16).bfloat16().t()
BIAS, ROW, C = torch.randn(8), torch.rand(6), torch.randn(6, 8).bfloat16()

EPILOGUES: dict[str, list[tuple[Any, ...]]] = {
    "none": [],
    "layer": [("bias", BIAS), ("activation", "gelu_tanh"), ("residual", C, 0.5)],
    "scales": [("scale", 2.0), ("scale", ROW[:1]), ("scale_row", ROW), ("scale_column", BIAS)],
    "other order": [("residual", C, 0.0), ("activation", "relu"), ("bias", BIAS), ("scale", 0.5)],
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_an_epilogue_crosses_the_operator_unchanged(name: str) -> None:
    expected = warploom.gemm(A, B, epilogue=EPILOGUES[name])
    assert torch.equal(operators.call(A, B, EPILOGUES[name], None, None, None), expected)
    out = torch.empty_like(expected)
    assert operators.call(A, B, EPILOGUES[name], out, None, None) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("a", [A, A.reshape(2, 3, 16)], ids=["matrix", "batch"])
def test_torch_finds_no_fault_with_the_operators(a: torch.Tensor) -> None:
    arguments = (a, B, ["bias", "relu", "scale"], [BIAS], [0.5], torch.bfloat16, None)
    torch.library.opcheck(torch.ops.warploom.gemm.default, arguments)
    out = torch.empty(*a.shape[:-1], 8, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.warploom.gemm_out.default, arguments, {"out": out})


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
