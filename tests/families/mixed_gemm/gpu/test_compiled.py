"""torch.compile, torch.library and autograd on the GPU."""

from __future__ import annotations

import mixed_arena as arena
import mixed_cases as cases
import pytest
import torch
from mixed_cases import SIMPLE
from watched import operator_called

import warploom
from warploom.quantization import PackedWeight

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
N, K = 136, 256


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def packed(n: int = N, k: int = K, seed: int = 0) -> PackedWeight:
    return arena.weight(cases.operation(), n, k, seed).packed


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_torch_compile_takes_a_layer_without_a_graph_break(backend: str) -> None:
    weight, bias = packed(), drawn(N)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return warploom.mixed_gemm(x * 2, weight, bias=bias, activation="silu") + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for scale in (1.0, 2.0):
        x = drawn(17, K) * scale
        torch.testing.assert_close(compiled(x), layer(x), rtol=2**-7, atol=2**-7)


def test_the_graphs_of_torch_compile_replay_on_new_contents() -> None:
    weight = packed()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return warploom.mixed_gemm(x + 1, weight).float() * 2

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            x = drawn(17, K)
            assert torch.equal(compiled(x).clone(), layer(x))


def test_torch_finds_no_fault_with_the_operator() -> None:
    weight, a = packed(), drawn(17, K)
    warploom.mixed_gemm(a, weight)  # operators are registered when the runtime is first used
    torch.library.opcheck(*operator_called(lambda: warploom.mixed_gemm(a, weight)))


@pytest.mark.parametrize("m", [1, 43, 300])
def test_the_gradient_is_that_of_a_product_with_the_weight_that_was_packed(m: int) -> None:
    weight, bias, residual = packed(), drawn(N), drawn(m, N)
    x, dd = drawn(m, K), drawn(m, N)
    found, wanted = [], []
    w = weight.dequantize(torch.float64)
    for function, into, wide in (
        (
            lambda a, b, c: warploom.mixed_gemm(a, weight, bias=b, activation="silu", residual=c),
            found,
            False,
        ),
        (lambda a, b, c: torch.nn.functional.silu(a @ w.t() + b) + c, wanted, True),
    ):
        leaves = [one.double() if wide else one.clone() for one in (x, bias, residual)]
        for leaf in leaves:
            leaf.requires_grad_()
        function(*leaves).backward(dd.double() if wide else dd)
        into.extend(leaf.grad for leaf in leaves)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, rtol=2**-5, atol=2**-5 * other.abs().max())


def test_a_frozen_layer_beside_one_that_learns_passes_its_gradient_on() -> None:
    """As adapters do: the packed weight has none, and what is before it learns."""
    first, weight = torch.nn.Linear(K, K, device="cuda", dtype=torch.bfloat16), packed()
    x = drawn(43, K)
    for _ in range(2):
        first.zero_grad()
        warploom.mixed_gemm(first(x), weight).float().square().mean().backward()
        assert first.weight.grad is not None and first.weight.grad.isfinite().all()
        assert first.weight.grad.abs().max() > 0


def test_autocast_lowers_activations() -> None:
    made = arena.call(SIMPLE["few"], 16, N, K)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = warploom.mixed_gemm(made.a.view.float(), made.weight.packed, spec=made.spec)
    assert torch.equal(found, made.run())
