"""`warploom.fp32.activate`: torch's fp32 products run by pieces, and are given back to torch.

It is activated for CPU tensors here, whose references compute as kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.integrations import devices, fp32


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fp32, "_KEY", "CPU")
    monkeypatch.setattr(fp32, "LEAST", 64**3)
    monkeypatch.setitem(devices.reasons, -1, None)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def near(d: torch.Tensor, exact: torch.Tensor, bound: float = 2e-6) -> bool:
    return float((d.detach() - exact.detach()).norm() / exact.detach().norm()) < bound


def test_products_and_their_gradients_run_by_pieces() -> None:
    layer = torch.nn.Linear(96, 64)
    x = torch.randn(128, 96, requires_grad=True)
    with warploom.fp32.activate() as activation:
        y = layer(x)
        dx, dw = torch.autograd.grad(y.square().sum(), (x, layer.weight))
    assert activation.ran["addmm", "fp32"] == 1
    assert activation.ran["mm", "fp32"] == 2
    dy = 2 * y.double()
    assert near(y, x.double() @ layer.weight.double().t() + layer.bias)
    assert near(dx, dy @ layer.weight.double())
    assert near(dw, dy.t() @ x.double())


@pytest.mark.parametrize(
    ("setting", "only", "precision"),
    [
        ("highest", None, "fp32"),
        ("high", None, "bf16x3"),
        ("medium", None, "torch"),
        ("highest", "high", "torch"),
        ("high", "high", "bf16x3"),
        ("high", "highest", "torch"),
    ],
)
def test_torchs_setting_decides_at_each_call(
    setting: str, only: fp32.Only | None, precision: str
) -> None:
    """What is left to torch is torch's result in the same setting.

    Under "medium" a CPU with bf16 instructions rounds operands to bf16, and others do not. The
    result differs from both where other operands than the caller's are passed on to torch.
    """
    a, b = torch.randn(64, 80), torch.randn(80, 64)
    torch.set_float32_matmul_precision(setting)
    torchs = a @ b
    with warploom.fp32.activate(only) as activation:
        d = a @ b
    assert dict(activation.ran) == {("mm", precision): 1}
    if precision == "torch":
        assert near(d, torchs)
    else:
        assert near(d, a.double() @ b.double(), 1e-4)


def test_batches_residuals_and_results_of_the_caller() -> None:
    a, b, added = torch.randn(3, 64, 72), torch.randn(3, 72, 64), torch.randn(64, 64)
    with warploom.fp32.activate() as activation:
        assert near(a @ b, a.double() @ b.double())
        found = torch.addmm(added, a[0], b[0], beta=0.5)
        out = torch.full((64, 64), torch.nan)
        assert torch.mm(a[0], b[0], out=out) is out
    assert near(found, 0.5 * added + a[0].double() @ b[0].double())
    assert near(out, a[0].double() @ b[0].double())
    assert {name for name, precision in activation.ran if precision == "fp32"} == {
        "bmm",
        "addmm",
        "mm",
    }


def test_what_kernels_do_not_take_is_torchs() -> None:
    a, b = torch.randn(64, 80), torch.randn(80, 64)
    with warploom.fp32.activate() as activation:
        torch.mm(a[:8], b)  # few rows
        torch.mm(a.double(), b.double())
        torch.addmm(torch.randn(64), a, b, alpha=2)
    assert {precision for _, precision in activation.ran} == {"torch"}


def test_removed_it_is_torchs_again() -> None:
    """A matmul that still ran by pieces, or was passed on to torch, would have been counted."""
    a = torch.randn(64, 64)
    activation = warploom.fp32.activate()
    during = a @ a
    assert dict(activation.ran) == {("mm", "fp32"): 1}
    activation.remove()
    activation.remove()
    for d in (during, a @ a):
        assert near(d, a.double() @ a.double())
    assert activation.ran.total() == 1


@pytest.mark.parametrize(("newer", "precision"), [("tf32", "bf16x3"), ("ieee", "fp32")])
def test_torchs_newer_setting_decides_where_it_is_used(newer: str, precision: str) -> None:
    """torch refuses to say the older one then: each product of a process raised its error."""
    torch.backends.cuda.matmul.fp32_precision = newer
    a = torch.randn(64, 64)
    with warploom.fp32.activate() as activation:
        a @ a
    assert dict(activation.ran) == {("mm", precision): 1}


def test_a_parameter_that_is_written_to_without_torchs_knowledge_counts_as_it_is() -> None:
    """Its version stays the same: the pieces of what it was before were multiplied."""
    weight, x = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64)
    with warploom.fp32.activate(), torch.no_grad():
        torch.mm(weight, x)
        weight.data.mul_(2)
        y = torch.mm(weight, x)
    assert near(y, weight.double() @ x.double())


def test_a_factor_that_is_not_finite_is_torchs() -> None:
    a = torch.randn(64, 64)
    with warploom.fp32.activate() as activation:
        assert not torch.addmm(a, a, a, beta=torch.inf).isfinite().any()
    assert dict(activation.ran) == {("addmm", "torch"): 1}


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ProblemError, match="only 'medium'"):
        warploom.fp32.activate("medium")  # type: ignore[arg-type]
