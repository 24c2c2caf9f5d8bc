"""Strassen's algorithm on the CPU: its sums, its error, what it takes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gemm_strassen import Case, operands

import warploom
from warploom.errors import ProblemError
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._product.epilogue import items
from warploom.runtime.families._product.reference import apply
from warploom.runtime.families.gemm import strassen
from warploom.runtime.families.gemm.strassen import LEVELS, error_share

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = [
    Case((64, 64, 64), BF16, BF16),
    Case((96, 160, 224), FP16, FP32),
    Case((32, 256, 512), BF16, FP32),
    Case((77, 90, 101), BF16, FP16),
    Case((33, 47, 64), FP16, FP16),
]


@pytest.mark.parametrize("algorithm", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layouts", ["row_col", "row_row", "col_row", "col_col"])
def test_result_is_that_of_the_algorithm(algorithm: str, case: Case, layouts: str) -> None:
    a, b = operands(case, layouts=layouts)
    d = warploom.gemm(a, b, algorithm=algorithm, out_dtype=case.out)
    assert d.dtype == case.out
    assert error_share(d, a, b, LEVELS[algorithm]) <= 1


@pytest.mark.parametrize("algorithm", LEVELS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_error_is_within_its_bound(algorithm: str, dtype: torch.dtype) -> None:
    """All of it beside the float64 product, where signs agree and where they do not."""
    generator = torch.Generator().manual_seed(0)
    for spread in (torch.randn, torch.rand):
        a = spread(128, 256, generator=generator).to(dtype)
        b = spread(256, 64, generator=generator).to(dtype)
        exact = a.double() @ b.double()
        largest = 256 * a.abs().max().double() * b.abs().max().double()
        bound = strassen.normwise_error(dtype, 256, LEVELS[algorithm]) * largest
        d = warploom.gemm(a, b, algorithm=algorithm, out_dtype=FP32)
        assert (d.double() - exact).abs().max() <= bound
        plain = warploom.gemm(a, b, out_dtype=FP32)
        assert (plain.double() - exact).abs().max() < (d.double() - exact).abs().max()


def test_error_bound_is_reached_within_a_small_factor() -> None:
    """Operands that round S and T by half a unit each, so that a looser bound would be noticed."""
    unit = unit_roundoff(BF16)
    a, b = torch.ones(16, 16, dtype=BF16), torch.ones(16, 16, dtype=BF16)
    a[8:, :8] = 1 - unit  # a row of neighbours whose sums are halfway between two numbers
    b[:8, 8:] = 1 - unit
    d = warploom.gemm(a, b, algorithm="strassen", out_dtype=FP32).double()
    error = (d - a.double() @ b.double()).abs().max() / 16
    assert 0.01 * 17 * unit < error <= strassen.normwise_error(BF16, 16, 1)


def test_sums_are_rounded_once() -> None:
    """1 + 2^-8 + 2^-8: rounded after each addition it stays 1."""
    one, small = torch.ones(8, 8, dtype=BF16), torch.full((8, 8), 2.0**-8, dtype=BF16)
    sums = strassen.sums("strassen_a", (-one, 0 * one, small, small))
    assert torch.equal(sums[1], torch.full_like(one, 1 + 2.0**-7))
    sums = strassen.sums("strassen_b", (one, 0 * one, -small, small))
    assert torch.equal(sums[1], torch.full_like(one, 1 + 2.0**-7))


def test_rims_are_ordinary_products() -> None:
    a, b = operands(Case((77, 90, 96), BF16, BF16))
    d, plain = warploom.gemm(a, b, algorithm="strassen"), warploom.gemm(a, b)
    assert torch.equal(d[64:], plain[64:])
    assert torch.equal(d[:, 80:], plain[:, 80:])
    assert not torch.equal(d[:64, :80], plain[:64, :80])


@pytest.mark.parametrize("algorithm", LEVELS)
@pytest.mark.parametrize("offset", [0, 1])
def test_misaligned_views_are_copied(algorithm: str, offset: int) -> None:
    whole = torch.randn(70, 71).to(BF16)
    a, b = whole[:64, offset : offset + 64], whole[offset : offset + 64, 3:67].t()
    d = warploom.gemm(a, b, algorithm=algorithm)
    assert error_share(d, a, b, LEVELS[algorithm]) <= 1


EPILOGUES: dict[str, Callable[[int, int], dict[str, object]]] = {
    "bias": lambda m, n: {"bias": torch.randn(n), "activation": "gelu"},
    "scales": lambda m, n: {"scale_a": torch.rand(m), "scale_b": torch.rand(1, n)},
    "numbers": lambda m, n: {"scale_a": 0.25, "scale_d": torch.tensor(2.0)},
    "residual": lambda m, n: {"residual": torch.randn(m, n).to(BF16), "beta": -0.5},
    "list": lambda m, n: {
        "epilogue": [("residual", torch.randn(m, n), 1.0), ("activation", "relu")]
    },
}


@pytest.mark.parametrize("algorithm", LEVELS)
@pytest.mark.parametrize("shape", [(64, 96, 64), (77, 90, 101)])
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogue_is_applied_once(algorithm: str, shape: tuple[int, int, int], name: str) -> None:
    a, b = operands(Case(shape, BF16, FP32))
    keywords = EPILOGUES[name](shape[0], shape[1])
    d = warploom.gemm(a, b, algorithm=algorithm, out_dtype=FP32, **keywords)  # type: ignore[arg-type]
    product = warploom.gemm(a, b, algorithm=algorithm, out_dtype=FP32)
    expected = apply(product, items(**keywords))  # type: ignore[arg-type]
    torch.testing.assert_close(d, expected, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(d, product, rtol=1e-2)


@pytest.mark.parametrize("algorithm", LEVELS)
def test_result_is_added_to_in_place(algorithm: str) -> None:
    a, b = operands(Case((80, 64, 96), BF16, FP32))
    total = torch.randn(80, 64)
    before = total.clone()
    result = warploom.gemm(a, b, out=total, residual=total, algorithm=algorithm)
    assert result is total
    expected = before + warploom.gemm(a, b, algorithm=algorithm, out_dtype=FP32)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)


def test_result_goes_where_out_is() -> None:
    a, b = operands(Case((77, 90, 64), BF16, BF16))
    room = torch.full((100, 128), float("nan"), dtype=BF16)
    out = room[10:87, 16:106]
    assert warploom.gemm(a, b, out=out, algorithm="strassen") is out
    assert torch.equal(out, warploom.gemm(a, b, algorithm="strassen"))
    room[10:87, 16:106] = float("nan")
    assert room.isnan().all()


# ---- Autograd and compilers ----------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", LEVELS)
def test_gradients_are_those_of_ordinary_products(algorithm: str) -> None:
    a, b = operands(Case((64, 96, 128), BF16, BF16))
    bias, residual = torch.randn(96), torch.randn(64, 96)
    tensors = [one.requires_grad_() for one in (a, b, bias, residual)]
    d = warploom.gemm(a, b, bias=bias, residual=residual, algorithm=algorithm)
    plain = warploom.gemm(a, b, bias=bias, residual=residual)
    incoming = torch.randn(64, 96).to(BF16)
    for one, other in zip(
        torch.autograd.grad(d, tensors, incoming),
        torch.autograd.grad(plain, tensors, incoming),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_activation_is_differentiated_at_an_ordinary_product() -> None:
    a, b = operands(Case((64, 96, 128), BF16, BF16))
    a.requires_grad_()
    incoming = torch.randn(64, 96).to(BF16)
    d = warploom.gemm(a, b, activation="gelu", algorithm="strassen")
    (gradient,) = torch.autograd.grad(d, a, incoming)
    plain = warploom.gemm(a, b, activation="gelu", preactivation="recompute")
    assert torch.equal(gradient, torch.autograd.grad(plain, a, incoming)[0])


def test_gradient_of_b_is_added_to_main_grad() -> None:
    a, b = operands(Case((64, 96, 128), BF16, BF16))
    b.requires_grad_()
    total = torch.ones(128, 96).t().contiguous().t()
    incoming = torch.randn(64, 96).to(BF16)
    warploom.gemm(a, b, algorithm="strassen", main_grad=total).backward(incoming)
    assert b.grad is None
    torch.testing.assert_close(total, 1 + a.float().t() @ incoming.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("algorithm", LEVELS)
def test_compiled_call_has_the_same_result(algorithm: str) -> None:
    a, b = operands(Case((64, 96, 128), BF16, BF16))
    a.requires_grad_()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, activation="relu", algorithm=algorithm)

    d, eager = compiled(a, b), warploom.gemm(a, b, activation="relu", algorithm=algorithm)
    assert torch.equal(d, eager)
    incoming = torch.randn(64, 96).to(BF16)
    first, second = (torch.autograd.grad(one, a, incoming)[0] for one in (d, eager))
    assert torch.equal(first, second)


def test_compiled_call_writes_to_out() -> None:
    a, b = operands(Case((64, 96, 128), BF16, BF16))
    out = torch.empty(64, 96, dtype=BF16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        warploom.gemm(a, b, out=out, algorithm="strassen")

    compiled(a, b, out)
    assert torch.equal(out, warploom.gemm(a, b, algorithm="strassen"))


def test_operators_pass_torchs_own_checks() -> None:
    a, b = operands(Case((64, 32, 48), BF16, BF16))
    call = strassen.GemmCall(a.requires_grad_(), b, out_dtype=BF16)
    values = (*call.encoded(strassen.PRODUCT), "recompute", None, None, 1)
    torch.library.opcheck(torch.ops.warploom.gemm_strassen.default, values)


def test_fake_tensors_have_the_shape() -> None:
    with torch._subclasses.FakeTensorMode():
        a, b = torch.empty(512, 256, dtype=BF16), torch.empty(256, 768, dtype=BF16)
        d = warploom.gemm(a, b, algorithm="strassen", out_dtype=FP32)
    assert (d.shape, d.dtype) == ((512, 768), FP32)


# ---- What it refuses -----------------------------------------------------------------------------

A, B = torch.zeros(64, 64, dtype=BF16), torch.zeros(64, 64, dtype=BF16)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "unknown": (lambda: warploom.gemm(A, B, algorithm="winograd"), "strassen or strassen2"),
    "number": (lambda: warploom.gemm(A, B, algorithm=2), "algorithm 2"),  # type: ignore[arg-type]
    "int8": (
        lambda: warploom.gemm(A.to(torch.int8), B.to(torch.int8), algorithm="strassen"),
        "8 bits do not hold sums of quarters",
    ),
    "fp8": (
        lambda: warploom.gemm(
            A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn), algorithm="strassen"
        ),
        "must be bf16 or fp16",
    ),
    "batched a": (lambda: warploom.gemm(A[None], B, algorithm="strassen"), "flatten"),
    "batched b": (lambda: warploom.gemm(A, B[None], algorithm="strassen"), "b \\[1, 64, 64\\]"),
    "small": (lambda: warploom.gemm(A[:15], B, algorithm="strassen"), "M 15 .* at least 16"),
    "small n": (lambda: warploom.gemm(A, B[:, :31], algorithm="strassen2"), "N 31 .* at least 32"),
    "small k": (lambda: warploom.gemm(A[:, :8], B[:8], algorithm="strassen"), "K 8 "),
    "gate": (lambda: warploom.gemm(A, B, gate="silu", algorithm="strassen"), "gate with"),
    "amax": (
        lambda: warploom.gemm(A, B, amax=torch.zeros(1), algorithm="strassen"),
        "amax with algorithm strassen",
    ),
    "rounding": (
        lambda: warploom.gemm(A, B, rounding="stochastic", algorithm="strassen"),
        "stochastic_rounding with",
    ),
    "8-bit result": (
        lambda: warploom.gemm(A, B, out_dtype=torch.float8_e4m3fn, algorithm="strassen"),
        "out_dtype torch.float8_e4m3fn",
    ),
    "promoted": (
        lambda: warploom.gemm(A, B, use_fast_accum=False, algorithm="strassen"),
        "use_fast_accum False",
    ),
    "spec": (
        lambda: warploom.gemm(A, B, spec=warploom.plan(A, B).choice.spec, algorithm="strassen"),
        "GEMMs of an algorithm choose their own kernels",
    ),
    "long epilogue": (
        lambda: warploom.gemm(
            A, B, epilogue=[("scale", 2.0), ("scale", 2.0), ("scale", 2.0)], algorithm="strassen2"
        ),
        "must leave 6 steps to the algorithm: a kernel has at most 8",
    ),
    "overlap": (lambda: warploom.gemm(A, B, out=A, algorithm="strassen"), "overlap"),
    "mismatch": (lambda: warploom.gemm(A, B[:32], algorithm="strassen"), "one K"),
    "list": (lambda: warploom.gemm([1.0], B, algorithm="strassen"), "must be a torch tensor"),  # type: ignore[arg-type]
    "vmap": (
        lambda: torch.vmap(lambda a: warploom.gemm(a, B, algorithm="strassen"))(A[None]),
        "vmap",
    ),
    "out with grad": (
        lambda: warploom.gemm(
            A.clone().requires_grad_(), B, out=torch.empty_like(A), algorithm="strassen"
        ),
        "out with a tensor that requires grad",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ProblemError, match=message):
        call()


def test_refuses_before_anything_is_written() -> None:
    out = torch.full((64, 64), float("nan"), dtype=BF16)
    with pytest.raises(ProblemError, match="must be a finite number"):
        warploom.gemm(A, B, out=out, scale_a=float("inf"), algorithm="strassen")
    assert out.isnan().all()


# ---- Explained -----------------------------------------------------------------------------------


def test_explanation_tells_the_products_and_what_is_saved() -> None:
    big = torch.empty(16384, 16384, dtype=BF16, device="meta")
    told = warploom.explain(big, big.t(), algorithm="strassen2", gpu="NVIDIA H200")
    assert "49 products of 4096x4096x4096, 23.4 % fewer multiplications" in told.reason
    told = warploom.explain(warploom.gemm, big, big.t(), algorithm="strassen", gpu="NVIDIA H200")
    assert "7 products of 8192x8192x8192, 12.5 % fewer multiplications" in told.reason
    assert "fp32" in told.kernel and "1.04 at 16384" in told.reason
    with pytest.raises(ProblemError, match="strassen or strassen2"):
        warploom.explain(big, big.t(), algorithm="fast", gpu="NVIDIA H200")


def test_explanation_leaves_ordinary_plans_alone() -> None:
    a, b = operands(Case((64, 64, 64), BF16, BF16))
    assert "strassen" in warploom.explain(a, b, algorithm="strassen").reason
    assert "strassen" not in warploom.explain(a[:32, :32], b[:32, :32], out_dtype=FP32).reason
