"""Steps that training needs, where a GPU shows it: limits, NaN, sums that repeat, whole layers."""

from __future__ import annotations

from typing import Any

import gemm_arena as arena
import gemm_cases as cases
import gemm_wider as wider
import pytest
import torch
from gemm_cases import short
from rooms import assert_repeats

import warploom
from warploom.generator.epilogue import Function
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._activation import gradient

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
OVER_FUNCTIONS = pytest.mark.parametrize("function", ["relu", "gelu", "gelu_tanh", "silu"])
INFINITY = float("inf")


def slopes(function: Function, x: torch.Tensor, dy: float = 1.0) -> torch.Tensor:
    """The kernel's derivative at x [n], times dy, in fp32."""
    a = torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda")
    b = torch.zeros(x.numel(), 64, dtype=torch.bfloat16, device="cuda").t()
    listed = [("bias", x), (f"{function}_gradient", torch.full((1, x.numel()), dy, device="cuda"))]
    found: torch.Tensor = warploom.gemm(a, b, epilogue=listed, out_dtype=torch.float32)[0]
    return found


@OVER_FUNCTIONS
def test_a_derivative_is_exact_at_its_limits_and_keeps_nan(function: Function) -> None:
    special = [-INFINITY, -3e38, -1e9, -200.0, 200.0, 1e9, 3e38, INFINITY, torch.nan]
    x = torch.tensor(special, device="cuda")
    found = slopes(function, x).tolist()
    assert found[:8] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found[8] != found[8]
    assert slopes(function, x, 0.0).tolist()[:8] == [0] * 8
    assert (
        slopes(function, torch.zeros(8, device="cuda")).tolist()
        == [0.0 if function == "relu" else pytest.approx(0.5, abs=2**-20)] * 8
    )


@OVER_FUNCTIONS
def test_a_derivative_is_as_near_as_its_bound_says_and_has_its_tail(function: Function) -> None:
    """Where the value cancels, as 1 - s far from 0, the tail would be noise or 0."""
    x = torch.linspace(-12, 12, 100_000, device="cuda")
    found, exact = slopes(function, x).double(), gradient.slope(function, x.double())
    error = (found - exact).abs()
    assert (error <= gradient.slope_error(function, x.double(), torch.zeros_like(exact))).all()
    tail = (x < -3) & (x > -8)
    assert (error <= 2.0**-8 * exact.abs())[tail].all()


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in wider.TRAINED if "column_sum" in kernel.name], ids=short
)
def test_sums_are_bit_equal_from_run_to_run(kernel: KernelSpec) -> None:
    """Added by whichever block came first, they would differ in their last bits."""
    made = arena.call(kernel, *cases.fitting((1023, 1021, 129), kernel))
    d = arena.verify(made).clone()
    sums = [item[1] for item in made.listed if item[0] == "column_sum"]
    wanted = [d, *(vector.clone() for vector in sums)]
    filled = [one for one in made.outputs if one.view.numel() > 1]
    assert_repeats(lambda: [made.run(), *sums], wanted, [made.d, *filled], runs=50)


@pytest.mark.parametrize("rows", [1, 257, 4096])
@pytest.mark.parametrize("batches", [(), (3,)], ids=str)
def test_a_nan_shows_in_its_column_and_no_row_past_the_end_does(
    rows: int, batches: tuple[int, ...]
) -> None:
    a = torch.ones(*batches, rows, 64, dtype=torch.bfloat16, device="cuda")
    b = torch.ones(*batches, 136, 64, dtype=torch.bfloat16, device="cuda").mT
    bias = torch.zeros(136, device="cuda")
    bias[5], bias[77] = torch.nan, INFINITY
    sums = torch.full((136,), -1.0, device="cuda")
    warploom.gemm(a, b, epilogue=[("bias", bias), ("column_sum", sums)])
    expected = torch.full((136,), 64.0 * rows * (batches or (1,))[0], device="cuda")
    expected[5], expected[77] = torch.nan, INFINITY
    assert torch.equal(sums.nan_to_num(nan=-7), expected.nan_to_num(nan=-7))


@pytest.mark.parametrize("each", [True, False], ids=["each batch", "all batches"])
def test_sums_of_batches_are_their_own_or_of_all(each: bool) -> None:
    a = torch.randn(5, 100, 64, device="cuda").bfloat16()
    b = torch.randn(5, 72, 64, device="cuda").bfloat16().mT
    room = torch.full((5, 80), -7.0, device="cuda")
    sums = room[:, 3:75] if each else room[1, 3:75]
    warploom.gemm(a, b, epilogue=[("column_sum", sums)], out_dtype=torch.float32)
    exact = (a.double() @ b.double()).sum(-2)
    torch.testing.assert_close(sums.double(), exact if each else exact.sum(0), rtol=1e-5, atol=1e-3)
    sums.fill_(-7)
    assert (room == -7).all()


def test_a_layers_backward_pass_from_what_was_stored_is_that_from_anew_and_torchs() -> None:
    x, weight = (torch.randn(s, 256, device="cuda").bfloat16() for s in (300, 136))
    bias = torch.randn(136, device="cuda")
    dy = torch.randn(300, 136, device="cuda").bfloat16()
    z, sums = torch.empty(300, 136, device="cuda"), torch.empty(136, device="cuda")
    linear: list[tuple[Any, ...]] = [("scale", 2.0**-4), ("bias", bias)]
    layer = [*linear, ("preactivation", z), ("activation", "gelu_tanh")]
    warploom.gemm(x, weight.t(), epilogue=layer)
    backward = [*linear, ("gelu_tanh_gradient", dy), ("column_sum", sums)]
    dz = warploom.gemm(x, weight.t(), epilogue=backward, out_dtype=torch.float32)
    inside = z.clone().requires_grad_()
    torch.nn.functional.gelu(inside, approximate="tanh").backward(dy.float())
    assert inside.grad is not None
    torch.testing.assert_close(dz, inside.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums, inside.grad.sum(0), rtol=1e-4, atol=1e-3)


def test_a_graph_replays_both_launches() -> None:
    a = torch.randn(300, 64, device="cuda").bfloat16()
    b = torch.randn(136, 64, device="cuda").bfloat16().t()
    sums = torch.empty(136, device="cuda")

    def run() -> torch.Tensor:
        found: torch.Tensor = warploom.gemm(a, b, epilogue=[("column_sum", sums)])
        return found

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    a.mul_(2)
    sums.fill_(torch.nan)
    graph.replay()
    expected = torch.empty_like(sums)
    warploom.gemm(a, b, epilogue=[("column_sum", expected)])
    assert torch.equal(sums, expected)
