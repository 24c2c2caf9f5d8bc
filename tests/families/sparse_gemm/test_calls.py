"""Calls on the CPU: what they return, what is copied and planned, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warploom
from warploom.errors import ProblemError
from warploom.generator.launches import NO_GPU
from warploom.runtime.families.sparse_gemm.call import SparseGemmCall

FUNCTIONS = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
TYPES = (torch.bfloat16, torch.float16)


def operands(
    *shape: int, n: int = 72, k: int = 96, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, warploom.SparseWeight]:
    torch.manual_seed(n + k)
    return torch.randn(*shape, k).to(dtype), warploom.sparsify(torch.randn(n, k).to(dtype))


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_product_with_bias_and_activation(dtype: torch.dtype, activation: str | None) -> None:
    x, weight = operands(2, 5, dtype=dtype)
    bias = torch.randn(72).to(dtype)
    y = warploom.sparse_gemm(x, weight, bias, activation)
    exact = FUNCTIONS[activation](x.double() @ weight.dense().double().mT + bias.double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2**-9)


def test_a_result_goes_where_it_is_told_to() -> None:
    x, weight = operands(3)
    room = torch.full((3, 80), 7.0, dtype=torch.bfloat16)
    y = warploom.sparse_gemm(x, weight, out=room[:, :72])
    assert y.data_ptr() == room.data_ptr()
    assert torch.equal(y, warploom.sparse_gemm(x, weight)) and (room[:, 72:] == 7).all()


def test_no_rows_and_one_row() -> None:
    x, weight = operands(0)
    assert warploom.sparse_gemm(x, weight).shape == (0, 72)
    row, _ = operands()
    assert torch.equal(
        warploom.sparse_gemm(row, weight), warploom.sparse_gemm(row[None], weight)[0]
    )


@pytest.mark.parametrize(
    ("x", "copies"),
    [
        (torch.zeros(4, 96), ()),
        (torch.zeros(2, 3, 96), ()),
        (torch.zeros(4, 104)[:, :96], ()),
        (torch.zeros(4, 97)[:, :96], ("x",)),
        (torch.zeros(96, 4).t(), ("x",)),
        (torch.zeros(96).expand(4, 96), ("x",)),
        (torch.zeros(2, 8, 96)[:, :3], ("x",)),
    ],
)
def test_what_tma_cannot_read_is_copied(x: torch.Tensor, copies: tuple[str, ...]) -> None:
    _, weight = operands(1)
    made = torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16)
    call = SparseGemmCall(made, weight.values, weight.metadata)
    draft = call.draft(NO_GPU)
    assert draft.details.copies == copies
    assert draft.problem.x_pitch == (96 if copies else max(made.stride(-2), 96))


@pytest.mark.parametrize(
    ("x", "out", "pitch"),
    [
        (torch.zeros(4, 96), torch.zeros(4, 80)[:, :72], 80),
        (torch.zeros(2, 3, 96), torch.zeros(2, 3, 72), 72),
        (torch.zeros(96), torch.zeros(72), 80),  # of one row: any that is aligned
        (torch.zeros(4, 96), None, 72),
    ],
)
def test_rows_of_a_result_are_as_far_apart_as_they_are(
    x: torch.Tensor, out: torch.Tensor | None, pitch: int
) -> None:
    _, weight = operands(1)
    made = None
    if out is not None:
        made = torch.empty_strided(out.shape, out.stride(), dtype=torch.bfloat16)
    call = SparseGemmCall(x.bfloat16(), weight.values, weight.metadata, out=made)
    assert call.draft(NO_GPU).problem.y_pitch == pitch


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.zeros(4, 96), torch.zeros(72, 4).t()),
        (torch.zeros(2, 3, 96), torch.zeros(2, 8, 72)[:, :3]),
        (torch.zeros(4, 96), torch.zeros(72).expand(4, 72)),
    ],
)
def test_a_result_without_one_row_stride_is_refused(x: torch.Tensor, out: torch.Tensor) -> None:
    _, weight = operands(1)
    made = torch.empty_strided(out.shape, out.stride(), dtype=torch.bfloat16)
    with pytest.raises(ProblemError, match=r"out .* must have"):
        warploom.sparse_gemm(x.bfloat16(), weight, out=made)


def test_a_compiler_sees_an_operator() -> None:
    x, weight = operands(4)
    bias = torch.randn(72).bfloat16()

    def product(x: torch.Tensor) -> torch.Tensor:
        return warploom.sparse_gemm(x, weight, bias, "silu")

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), product(x))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float16])
def test_eight_bits_are_scaled_by_rows(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, 5, 2080) * 20).to(dtype)
    weight = warploom.sparsify((torch.randn(72, 2080) * 20).to(dtype))
    scale_x, scale_weight = torch.rand(10, 1) / 64, torch.rand(72) / 64
    bias = torch.randn(72).to(out_dtype or torch.bfloat16)
    y = warploom.sparse_gemm(
        x,
        weight,
        bias,
        "silu",
        scale_x=scale_x,
        scale_weight=scale_weight,
        out_dtype=out_dtype,
    )
    sums = x.double() @ weight.dense().double().mT
    z = sums * scale_x.double().reshape(2, 5, 1) * scale_weight.double() + bias.double()
    assert y.dtype == (out_dtype or torch.bfloat16) and y.shape == (2, 5, 72)
    torch.testing.assert_close(y.double(), F.silu(z), rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gradients_of_x_and_bias(activation: str | None) -> None:
    x, weight = operands(2, 5)
    x.requires_grad_()
    bias = torch.randn(72).bfloat16().requires_grad_()
    y = warploom.sparse_gemm(x, weight, bias, activation)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, bias), dy)
    exact = FUNCTIONS[activation](x.double() @ weight.dense().double().mT + bias.double())
    wanted = torch.autograd.grad(exact, (x, bias), dy.double())
    for one, other in zip(found, wanted, strict=True):
        error = (one.double() - other.double()).abs().max()
        assert one.dtype == torch.bfloat16
        assert error <= 2**-6 * other.double().abs().max()


def test_a_compiler_differentiates_it() -> None:
    x, weight = operands(4)
    x.requires_grad_()

    def product(x: torch.Tensor) -> torch.Tensor:
        return warploom.sparse_gemm(x, weight, None, "silu")

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    dy = torch.randn(4, 72).bfloat16()
    found, wanted = (torch.autograd.grad(one(x), x, dy)[0] for one in (compiled, product))
    assert torch.equal(found, wanted)


EIGHT: dict[str, Any] = {
    "x": torch.ones(4, 96).to(torch.int8),
    "weight": warploom.sparsify(torch.ones(72, 96).to(torch.int8)),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(72, 96)}, "of type Tensor: must be a SparseWeight"),
        ({"x": torch.zeros(4, 96)}, "x of torch.float32 with a weight of torch.bfloat16"),
        ({"x": torch.zeros(4, 80).bfloat16()}, r"x \[4, 80\] by a sparse weight \[72, 96\]"),
        ({"bias": torch.zeros(71).bfloat16()}, r"bias \[71\] .* must be contiguous \[72\]"),
        ({"activation": "tanh"}, "activation 'tanh': must be one of relu"),
        ({"out": torch.zeros(4, 71).bfloat16()}, r"out \[4, 71\] .* must be \[4, 72\]"),
        (
            {"weight": warploom.sparsify(torch.ones(72, 96).to(torch.int8))},
            "x of torch.bfloat16 with a weight of torch.int8",
        ),
        (
            {
                "x": torch.zeros(4, 96).bfloat16().requires_grad_(),
                "out": torch.zeros(4, 72).bfloat16(),
            },
            "sparse_gemm is differentiable in x and bias of 16 bits, and without out",
        ),
        ({"scale_x": torch.ones(1)}, "are for x and weights of 8 bits"),
        ({"out_dtype": torch.float32}, "a result of torch.float32 with x of torch.bfloat16"),
        (
            EIGHT | {"scale_x": torch.ones(4)},
            "scale_weight None .* must be passed together",
        ),
        (
            EIGHT | {"scale_x": torch.ones(3), "scale_weight": torch.ones(72)},
            r"scale_x torch.float32 \[3\] .* of one element or of 4",
        ),
        (
            EIGHT | {"scale_x": torch.ones(4), "scale_weight": torch.ones(72).double()},
            r"scale_weight torch.float64 \[72\]",
        ),
        (EIGHT | {"bias": torch.ones(72)}, "bias of torch.float32 with a result of torch.bfloat16"),
    ],
)
def test_what_cannot_be_multiplied_is_named(change: dict[str, Any], message: str) -> None:
    x, weight = operands(4)
    with pytest.raises(ProblemError, match=message):
        warploom.sparse_gemm(**{"x": x, "weight": weight, **change})
