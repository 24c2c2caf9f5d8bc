"""The recipe fp4_qat: e2m1 in e4m3 GEMMs, a soft gradient of the weight's quantiser, outliers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_bounds import ACTIVATIONS, within

import warploom
from warploom.errors import ProblemError
from warploom.integrations import fp4

IN, OUT, ROWS = 300, 32, 20
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def layer(**options: Any) -> warploom.nn.Linear:
    torch.manual_seed(0)
    given = {"dtype": torch.bfloat16, "recipe": "fp4_qat", **options}
    return warploom.nn.Linear(IN, OUT, **given)


def rows() -> torch.Tensor:
    """Rows with outliers, which one scale for all would round the rest to nothing for."""
    x = torch.randn(ROWS, IN)
    x[:, 7] *= 50
    return (x * torch.logspace(-3, 3, ROWS).unsqueeze(-1)).bfloat16()


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The nearest value of e2m1 by comparing all; of two, the one whose last bit is 0."""
    places = (x.abs().unsqueeze(-1) - E2M1).abs()
    best = places.amin(-1, keepdim=True)
    even = torch.arange(8) % 2
    index = torch.where(places == best, even, 9).argmin(-1)
    return torch.copysign(E2M1[index], x)


def expected(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In float64: the quantised input, its outliers, the quantised weight, the weight's slope."""
    wide, own = x.double(), weight.double()
    bounds = torch.quantile(wide, torch.tensor([0.01, 0.99]).double(), dim=1, keepdim=True)
    inner = wide.clamp(bounds[0], bounds[1])
    scale, of_weight = (one.abs().amax(1, keepdim=True) / 6 for one in (inner, own))
    v = own / of_weight
    size = v.abs()
    lower = torch.searchsorted(E2M1, size.contiguous(), right=True).clamp(max=7) - 1
    low, high = E2M1[lower], E2M1[lower + 1]
    distance = (2 * (size - low) / (high - low) - 1).abs()
    slope = (0.2 * distance**-0.8).clamp(max=3)
    return nearest(inner / scale) * scale, wide - inner, nearest(v) * of_weight, slope


def test_values_are_rounded_to_the_nearest_of_e2m1() -> None:
    x = torch.linspace(-6, 6, 4801)  # with every tie
    assert torch.equal(fp4.rounded(x).double(), nearest(x.double()))


def test_the_slope_is_that_of_the_papers_estimator() -> None:
    """k 5, at most 3: 0.2 at values of e2m1, 3 half way between two, 1 on average or less."""
    values = E2M1.float()
    middles = (values[1:] + values[:-1]) / 2
    assert torch.equal(fp4.slope(values), torch.full((8,), 0.2))
    assert torch.equal(fp4.slope(-middles), torch.full((7,), 3.0))
    quarter = values[:-1] + (values[1:] - values[:-1]) / 4
    assert torch.allclose(fp4.slope(quarter), torch.tensor(0.2 * 0.5**-0.8))


@pytest.mark.parametrize("columns", [1, 2, 50, 101, 300])
def test_rows_are_clamped_to_their_quantiles(columns: int) -> None:
    x = torch.randn(7, columns)
    low, high = torch.quantile(x, torch.tensor([0.01, 0.99]), dim=1, keepdim=True)
    assert torch.allclose(fp4.clamped(x), x.clamp(low, high), atol=1e-6)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_the_product_is_of_fp4_and_of_outliers(activation: str | None) -> None:
    module, x = layer(activation=activation), rows()
    residual = torch.randn(ROWS, OUT)
    inner, outliers, weight, _ = expected(x, module.weight.detach())
    product = (inner + outliers) @ weight.t() + module.bias.detach().double()
    magnitude = (inner.abs() + outliers.abs()) @ weight.abs().t() + 4
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            y = module(x, residual)
        wanted = ACTIVATIONS[activation](product) + residual.double()
        assert within(y.detach(), wanted, magnitude)
    assert outliers.abs().max() > 10 * inner.abs().max()  # what the clamp alone would lose


@pytest.mark.parametrize("wanted", ["both", "x", "weight"])
@pytest.mark.parametrize("in_main_grad", [False, True])
def test_gradients_go_through_the_soft_quantiser(wanted: str, in_main_grad: bool) -> None:
    module = layer(accumulate_into_main_grad=in_main_grad)
    module.weight.requires_grad_(wanted != "x")
    module.weight.main_grad = torch.ones(OUT, IN)
    x, dy = rows().requires_grad_(wanted != "weight"), torch.randn(ROWS, OUT).bfloat16()
    module(x).backward(dy)
    inner, outliers, weight, slope = expected(x.detach(), module.weight.detach())
    wide = dy.double()
    if wanted != "weight":
        assert within(x.grad, wide @ weight, wide.abs() @ weight.abs())
    if wanted != "x":
        dw = module.weight.main_grad - 1 if in_main_grad else module.weight.grad
        whole = inner + outliers
        # A weight that fp32 puts beside its middle has a slope of less than 3.
        assert within(dw, wide.t() @ whole * slope, wide.abs().t() @ whole.abs() * slope + 2**-6)
        assert (module.weight.grad is None) == in_main_grad
    assert within(module.bias.grad, wide.sum(0), wide.abs().sum(0))


def test_the_e4m3_gemm_is_the_one_that_is_explained() -> None:
    module = layer()
    told = warploom.explain(module, rows(), gpu="NVIDIA H200")
    assert "e4m3" in told.kernel


def test_gradients_in_another_type_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"bfloat16 with recipe 'fp4_qat'"):
        layer(gradient_dtype=torch.bfloat16)
