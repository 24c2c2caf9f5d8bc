"""torch.compile and torch.library on the GPU."""

from __future__ import annotations

import gemm_arena as arena
import pytest
import torch
from gemm_cases import SIMPLE

import warploom

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_torch_compile_takes_a_layer_without_a_graph_break(backend: str) -> None:
    made = arena.call(SIMPLE["layer"], 257, 136, 193)
    a, b, bias, residual = made.a.view, made.b.view, made.listed[1][1], made.listed[3][1]

    def layer(a: torch.Tensor) -> torch.Tensor:
        hidden = warploom.gemm(a, b, bias=bias, activation="silu")
        return warploom.gemm(hidden, hidden.t(), out_dtype=torch.float32)

    def with_residual(a: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, residual=residual, beta=0.5, scale_a=2.0)

    for function in (layer, with_residual):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for scale in (1.0, 2.0):
            assert torch.equal(compiled(a * scale), function(a * scale))


def test_torch_compile_writes_to_out() -> None:
    made = arena.call(SIMPLE["tma"], 257, 136, 193)
    b = made.b.view

    def into(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, out=out)

    compiled = torch.compile(into, fullgraph=True, backend="inductor")
    out = torch.full((257, 136), torch.nan, dtype=torch.bfloat16, device="cuda")
    compiled(made.a.view, out)
    assert torch.equal(out, warploom.gemm(made.a.view, b))


def test_torch_finds_no_fault_with_the_operators() -> None:
    made = arena.call(SIMPLE["layer"], 257, 136, 193)
    made.run()  # operators are registered when the runtime is first used
    bias = made.listed[1][1]
    arguments = (made.a.view, made.b.view, ["bias", "relu"], [bias], [])
    arguments = (*arguments, torch.bfloat16, "fast", None)
    torch.library.opcheck(torch.ops.warploom.gemm.default, arguments)
    out = {"out": torch.zeros(257, 136, dtype=torch.bfloat16, device="cuda")}
    torch.library.opcheck(torch.ops.warploom.gemm_out.default, arguments, out)
    quantised = (*arguments[:2], ["amax"], [], [], torch.bfloat16, "fast", None)
    out["amax"] = torch.zeros(1, device="cuda")
    torch.library.opcheck(torch.ops.warploom.gemm_out.default, quantised, out)


def test_torch_compile_raises_an_amax() -> None:
    made = arena.call(SIMPLE["tma"], 257, 144, 193)
    b = made.b.view

    def quantise(a: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, amax=amax, scale_d=0.5, out_dtype=torch.float8_e4m3fn)

    amaxes = torch.zeros(2, 1, device="cuda")
    compiled = torch.compile(quantise, fullgraph=True, backend="inductor")
    d, expected = compiled(made.a.view, amaxes[0]), quantise(made.a.view, amaxes[1])
    assert torch.equal(d.view(torch.uint8), expected.view(torch.uint8))
    assert amaxes[0].item() == amaxes[1].item() > 10
