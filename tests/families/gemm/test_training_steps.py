"""Steps that training needs: one stores what an activation is given, one has its derivative."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.generator.epilogue import Function
from warploom.runtime.families._activation import gradient
from warploom.runtime.families._product.epilogue import bind
from warploom.runtime.families._product.reference import apply
from warploom.runtime.families.gemm import operators, reference
from warploom.runtime.families.gemm.call import GemmCall

BF16, FP32 = torch.bfloat16, torch.float32
FUNCTIONS = ("relu", "gelu", "gelu_tanh", "silu")
OVER_FUNCTIONS = pytest.mark.parametrize("function", FUNCTIONS)
INFINITY = float("inf")
M, K, N = 11, 24, 13
A = torch.randn(M, K, generator=torch.Generator().manual_seed(1)).to(BF16)
B = torch.randn(K, N, generator=torch.Generator().manual_seed(2)).to(BF16)
BIAS = torch.randn(N, generator=torch.Generator().manual_seed(3))
PRODUCT = A.float() @ B.float()


def full(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


# ---- What passes is stored -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, BF16, FP32], ids=str)
def test_what_passes_is_stored_and_goes_on_unchanged(dtype: torch.dtype) -> None:
    """Stored a step too late, the gradient would be that of the activation's result."""
    before, z = [("bias", BIAS)], full(M, N, dtype=dtype)
    after = [("activation", "gelu"), ("scale", 3.0)]
    found = warploom.gemm(A, B, epilogue=[*before, ("preactivation", z), *after])
    assert torch.equal(found, warploom.gemm(A, B, epilogue=[*before, *after]))
    assert torch.equal(z, warploom.gemm(A, B, epilogue=before, out_dtype=dtype))


def test_several_matrices_are_stored_each_where_it_stands() -> None:
    first, last = full(M, N), full(M, N)
    warploom.gemm(
        A, B, epilogue=[("preactivation", first), ("scale", 2.0), ("preactivation", last)]
    )
    assert torch.equal(last, 2 * first)


def test_only_the_matrix_is_stored() -> None:
    """A slice of a wider buffer, as of the gates of two layers; what is beside it is another's."""
    room = torch.full((M + 2, N + 5), -7.0)
    z = room[1:-1, 2 : 2 + N]
    warploom.gemm(A, B, epilogue=[("preactivation", z)])
    torch.testing.assert_close(z, PRODUCT)
    z.fill_(-7)
    assert (room == -7).all()


@pytest.mark.parametrize("shape", [(2, 3, M, N), (6 * M, N)], ids=str)
def test_batches_are_stored_as_they_are_or_as_rows(shape: tuple[int, ...]) -> None:
    z, a = full(*shape), torch.randn(2, 3, M, K).to(BF16)
    warploom.gemm(a, B, epilogue=[("preactivation", z)])
    torch.testing.assert_close(z, (a.float() @ B.float()).reshape(shape))


def test_a_stored_matrix_of_a_product_of_nothing_is_that_of_0() -> None:
    z = full(M, N)
    warploom.gemm(A[:, :0], B[:0], epilogue=[("bias", BIAS), ("preactivation", z)])
    assert torch.equal(z, BIAS.expand(M, N))


REFUSED: dict[str, tuple[torch.Tensor, str]] = {
    "another shape": (full(N, M), r"preactivation of shape \[13, 11\]"),
    "one for all batches": (full(M, N), r"must have shape \[2, 11, 13\]: it is stored"),
    "an expanded view": (full(M, N).expand(2, M, N), "no two elements at one address"),
    "columns apart": (full(2, N, M).mT, "contiguous along its last dimension"),
    "another type": (full(2, M, N, dtype=torch.float64), "float64"),
    "fp8": (torch.zeros(2, M, N).to(torch.float8_e5m2), "must be fp16, bf16 or fp32"),
    "wanting a gradient": (full(2, M, N).requires_grad_(), "requires grad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_matrix_that_cannot_be_stored_is_refused_by_name(name: str) -> None:
    z, said = REFUSED[name]
    with pytest.raises(ProblemError, match=said):
        warploom.gemm(A.expand(2, M, K), B.expand(2, K, N), epilogue=[("preactivation", z)])


def test_what_is_stored_overlaps_nothing_else_of_the_call() -> None:
    """The kernel reads and stores in no order that one could rely on."""
    out, z = full(M, N), full(M, N)
    residual = ("residual", z, 1.0)
    for listed, name in (
        ([("preactivation", out)], "out at .* and preactivation"),
        ([("preactivation", z), residual], "preactivation at .* and residual"),
        ([("preactivation", z), ("preactivation", z)], "preactivation at .* and preactivation"),
        ([("gelu_gradient", z), ("preactivation", z[:])], "preactivation at .* and gelu_gradient"),
    ):
        with pytest.raises(ProblemError, match=name):
            warploom.gemm(A, B, out=out, epilogue=listed)
    square = torch.zeros(8, 8, dtype=BF16)
    with pytest.raises(ProblemError, match=r"preactivation at .* and a at"):
        warploom.gemm(square, square.clone(), epilogue=[("preactivation", square)])


@pytest.mark.parametrize("shift", [0, 1])
def test_a_matrix_is_stored_in_pairs_or_keeps_d_from_tma(shift: int) -> None:
    """A word of two elements at an odd element would fault."""
    z = torch.zeros(M * 16 + 1)[shift:][: M * 16].view(M, 16)
    bound = bind([("preactivation", z)], (), M, 16, -1, batched=False)
    assert bound.paired is (shift == 0)


# ---- Derivatives ---------------------------------------------------------------------------------


@OVER_FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.float16, BF16, FP32], ids=str)
def test_a_gradient_is_what_autograd_has(function: str, dtype: torch.dtype) -> None:
    dy = torch.randn(M, N, generator=torch.Generator().manual_seed(4)).to(dtype)
    listed: list[tuple[Any, ...]] = [("bias", BIAS), (f"{function}_gradient", dy)]
    found = warploom.gemm(A, B, epilogue=listed, out_dtype=FP32)
    z = (PRODUCT + BIAS).requires_grad_()
    apply(z, [("activation", function)]).backward(dy.float())
    torch.testing.assert_close(found, z.grad, rtol=1e-4, atol=1e-6)


@OVER_FUNCTIONS
def test_a_derivative_has_its_limits_and_keeps_nan(function: Function) -> None:
    special = torch.tensor([-INFINITY, -1e30, -1e9, 1e9, 1e30, INFINITY, torch.nan, 0.0])
    for dtype in (FP32, torch.float64):
        found = gradient.slope(function, special.to(dtype)).tolist()
        assert found[:6] == [0, 0, 0, 1, 1, 1]
        assert found[6] != found[6]
        assert found[7] == (0 if function == "relu" else 0.5)


@OVER_FUNCTIONS
def test_dy_of_0_gives_0_wherever_the_derivative_is_a_number(function: str) -> None:
    bias = torch.tensor([-INFINITY, -30.0, -1.0, 0.0, 1.0, 30.0, INFINITY])
    zero, dy = torch.zeros(1, 16, dtype=BF16), torch.zeros(1, 7)
    listed = [("bias", bias), (f"{function}_gradient", dy)]
    assert not warploom.gemm(zero, torch.zeros(16, 7, dtype=BF16), epilogue=listed).any()


@OVER_FUNCTIONS
def test_the_bound_of_a_derivative_is_as_steep_as_it_gets(function: Function) -> None:
    """The error of x moves the derivative by the second one's largest value at most."""
    x = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    error = torch.full_like(x, 1e-3)
    moved = (gradient.slope(function, x + error) - gradient.slope(function, x)).abs()
    allowed = gradient.slope_error(function, x, error)
    assert (moved <= allowed).all()
    assert moved.max() > 0.95 * (allowed.max() - 2.0**-20)


@OVER_FUNCTIONS
def test_the_bound_follows_a_gradient_and_fails_a_wrong_one(function: str) -> None:
    dy = torch.randn(M, N, generator=torch.Generator().manual_seed(5))
    listed = [("scale", 0.5), (f"{function}_gradient", dy), ("bias", BIAS)]
    exact, bound = reference.gemm_bound(A, B, listed, FP32)
    found = reference.gemm(A, B, listed, FP32)
    assert ((found.double() - exact).abs() <= bound).all()
    wrong = reference.gemm(A, B, [listed[0], (f"{function}_gradient", 1.001 * dy), listed[2]], FP32)
    assert ((wrong.double() - exact).abs() > bound).double().mean() > 0.3


# ---- Under compilers -----------------------------------------------------------------------------


def test_outputs_and_gradients_cross_the_operator() -> None:
    dy, z, expected = torch.randn(M, N), full(M, N), full(M, N)
    listed = [("preactivation", z), ("silu_gradient", dy), ("amax", torch.zeros(1))]
    found = operators.call(GemmCall(A, B, listed, None, None, True, None))
    wanted = [("preactivation", expected), *listed[1:]]
    assert torch.equal(found, warploom.gemm(A, B, epilogue=wanted))
    assert torch.equal(z, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_sees_what_is_stored(backend: str) -> None:
    def layer(a: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        d = warploom.gemm(a, B, epilogue=[("preactivation", z), ("activation", "silu")])
        return d, z * 2

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    z, expected = full(M, N), full(M, N)
    assert all(map(torch.equal, compiled(A, z), layer(A, expected)))
    assert torch.equal(z, expected)


def test_torch_finds_no_fault_with_an_operator_that_stores() -> None:
    words = ["preactivation", "relu_gradient"]
    arguments = (A, B, words, [torch.randn(M, N)], [], BF16, "fast", None)
    into = {"out": torch.empty(M, N, dtype=BF16), "preactivation": full(M, N)}
    torch.library.opcheck(cast("Any", torch.ops.warploom).gemm_out.default, arguments, into)
