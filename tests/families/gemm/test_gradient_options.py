"""What gemm keeps for its backward pass, gradients of fp8, sums in place, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_gradients import (
    BF16,
    E4M3,
    E5M2,
    FP32,
    LAYOUTS,
    Items,
    K,
    M,
    N,
    exact,
    held,
    leaf,
    random,
    scales,
)
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError

# ---- What is kept, and what is computed ----------------------------------------------------------


def kept_by(call: Callable[[], torch.Tensor]) -> list[int]:
    found: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return [tensor.data_ptr() for tensor in found]


def test_only_what_the_wanted_gradients_need_is_kept() -> None:
    """With a frozen weight, as beside a low-rank adapter, the activations must not be kept."""
    a, b, c, bias = random(M, K), random(K, N), random(M, N), random(N)
    assert kept_by(lambda: warploom.gemm(leaf(a), b, bias=bias, residual=c)) == [b.data_ptr()]
    assert kept_by(lambda: warploom.gemm(a, leaf(b), bias=bias, residual=c)) == [a.data_ptr()]
    assert kept_by(lambda: warploom.gemm(a, b, bias=leaf(bias), residual=leaf(c))) == []


def test_a_graph_keeps_no_tensor_but_by_saving_it() -> None:
    d = warploom.gemm(leaf(random(M, K)), random(K, N), scale_a=scales(1), activation="silu")
    assert d.grad_fn is not None
    assert not [name for name, value in vars(d.grad_fn).items() if isinstance(value, torch.Tensor)]


def test_an_operand_that_was_changed_is_noticed() -> None:
    a, b = leaf(random(M, K)), random(K, N)
    d = warploom.gemm(a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        d.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_checkpoints_compute_the_same_gradients(reentrant: bool, activation: str | None) -> None:
    a, weight, bias = leaf(random(M, K)), leaf(random(N, K)), leaf(random(N))

    def layer(a: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, weight.t(), bias=bias, activation=activation)

    expected = torch.autograd.grad(layer(a).sum(), (a, weight, bias))
    for one in (a, weight, bias):
        one.grad = None
    checkpoint(layer, a, use_reentrant=reentrant).sum().backward()
    assert all(
        torch.equal(one.grad, other)  # type: ignore[arg-type]
        for one, other in zip((a, weight, bias), expected, strict=True)
    )


def test_a_plan_is_differentiable_as_a_call_is() -> None:
    a, b = leaf(random(M, K)), leaf(random(N, K).t())
    plan = warploom.plan(a, b, scale_a=2.0)
    found = torch.autograd.grad(plan(a, b, scale_a=2.0).sum(), (a, b))
    expected = torch.autograd.grad(warploom.gemm(a, b, scale_a=2.0).sum(), (a, b))
    assert all(map(torch.equal, found, expected))


def test_autocast_passes_gradients_to_what_it_lowered() -> None:
    a, weight = leaf(random(M, K, dtype=FP32)), leaf(random(N, K, dtype=FP32))
    with torch.autocast("cpu", dtype=BF16):
        d = warploom.gemm(a, weight.t())
    da, dw = torch.autograd.grad(d, (a, weight), random(M, N))
    assert (da.dtype, dw.dtype) == (FP32, FP32)
    held(dw, random(M, N).double().t() @ a.detach().to(BF16).double(), M, "weight")


# ---- fp8 and int8 --------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient_dtype", [None, BF16, E5M2])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2)])
def test_gradients_of_fp8_operands(
    dtypes: tuple[torch.dtype, torch.dtype], gradient_dtype: torch.dtype | None
) -> None:
    """Autograd brings a gradient to the type of its tensor, unless its grad_dtype says other."""
    a, b = leaf(random(32, 64).to(dtypes[0])), leaf(random(48, 64).t().to(dtypes[1]))
    for one in (a, b):
        one.grad_dtype = None
    scale, bias = scales(1), leaf(random(48))
    keywords: dict[str, Any] = {"scale_a": scale, "bias": bias, "activation": "silu"}
    d = warploom.gemm(a, b, gradient_dtype=gradient_dtype, **keywords)
    dd = random(32, 48) * 1e-6
    d.backward(dd)
    expected = exact(a, b, [("scale", scale), ("bias", bias), ("activation", "silu")], dd)
    coarse = 8 if gradient_dtype == E5M2 else 1  # e5m2 has three bits, over a sum of many
    for one, other in zip((a, b, bias), (*expected[:2], expected[3]), strict=True):
        assert one.grad is not None
        assert one.grad.dtype == BF16
        difference = (one.grad.double() - other).square().mean().sqrt()
        assert difference <= 0.01 * coarse * other.square().mean().sqrt()


def test_a_gradient_of_zeros_in_e5m2_is_zero() -> None:
    """Its scale is that of its largest magnitude: 0 / 0 would be NaN."""
    a, b = leaf(random(M, 16).to(E4M3)), random(8, 16).t().to(E4M3)
    a.grad_dtype = None
    d = warploom.gemm(a, b, gradient_dtype=E5M2)
    d.backward(torch.zeros_like(d))
    assert a.grad is not None
    assert torch.equal(a.grad, torch.zeros_like(a.grad))


def test_what_stands_beside_int8_operands_has_gradients() -> None:
    a = torch.randint(-127, 128, (M, K), dtype=torch.int8)
    b = torch.randint(-127, 128, (N, K), dtype=torch.int8).t()
    items: Items = [("scale", leaf(scales(1) / 1000)), ("bias", leaf(random(N)))]
    d = warploom.gemm(a, b, epilogue=items)
    found = torch.autograd.grad(d, [items[0][1], items[1][1]], random(M, N))
    expected = exact(a, b, items, random(M, N))[2:]
    for one, other in zip(found, expected, strict=True):
        held(one, other, M * N, "int8")


# ---- main_grad -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["row, col", "row, row", "rows of one matrix", "batches"])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("preactivation", ["save", "recompute"])
def test_the_gradient_of_b_is_added_in_place(layout: str, across: bool, preactivation: str) -> None:
    a, b = (leaf(operand) for operand in LAYOUTS[layout]())
    into = torch.randn(b.mT.shape).mT if across else torch.randn(b.shape)
    before = into.clone()
    keywords: dict[str, Any] = {"activation": "silu", "scale_a": 0.5, "scale_b": scales(N)}
    d = warploom.gemm(a, b, main_grad=into, preactivation=preactivation, **keywords)
    dd = random(*d.shape, seed=5)
    for times in (1, 2):
        d.backward(dd, retain_graph=True)
        expected = exact(
            a, b, [("scale", 0.5), ("scale_b", scales(N)), ("activation", "silu")], dd
        )[1]
        assert b.grad is None
        held((into - before) / times, expected, M, f"after {times}")


def test_accumulating_over_broadcast_batches_sums_them() -> None:
    a, b = leaf(random(2, 3, M, K)), leaf(random(3, K, N))
    into = torch.zeros(b.shape)
    d = warploom.gemm(a, b, main_grad=into)
    d.backward(random(*d.shape, seed=5))
    held(into, exact(a, b, [], random(*d.shape, seed=5))[1], 2 * M, "b")


def test_accumulating_is_seen_by_autograd() -> None:
    """Whoever saved the sums for a backward pass of their own must be told that they changed."""
    a, b, into = leaf(random(M, K)), leaf(random(K, N)), torch.zeros(K, N)
    version = into._version
    warploom.gemm(a, b, main_grad=into).sum().backward()
    assert into._version > version


# ---- Errors --------------------------------------------------------------------------------------

INTO = torch.zeros(K, N)
PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"main_grad": INTO.bfloat16()}, "main_grad of torch.bfloat16.*fp32"),
    "no tensor": ({"main_grad": 1.0}, "main_grad of 1.0.*fp32"),
    "shape": ({"main_grad": INTO.t()}, r"main_grad \[24, 16\].*as b, \[16, 24\]"),
    "device": ({"main_grad": INTO.to("meta")}, "on meta.*as b"),
    "grad": ({"main_grad": leaf(INTO)}, "requires grad.*must not.*detach"),
    "expanded": ({"main_grad": INTO[:1].expand(K, N)}, "main_grad.*one address"),
    "preactivation": ({"preactivation": "keep"}, "'keep'.*save or recompute"),
    "gradient_dtype": ({"gradient_dtype": FP32}, "gradient_dtype torch.float32.*float8_e5m2"),
    "out": ({"out": torch.zeros(M, N).bfloat16()}, "out with a tensor that requires grad"),
    "amax": ({"amax": torch.zeros(1).requires_grad_()}, "amax.*requires grad.*output of its step"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_gradients_cannot_be_had_of_is_refused_by_the_forward_call(case: str) -> None:
    keywords, match = PROBLEMS[case]
    with pytest.raises(ProblemError, match=match):
        warploom.gemm(leaf(random(M, K)), leaf(random(K, N)), **keywords)


def test_accumulating_for_a_frozen_b_is_refused() -> None:
    a, b = leaf(random(M, K)), random(K, N)
    with pytest.raises(ProblemError, match="does not require grad"):
        warploom.gemm(a, b, main_grad=INTO)
    with torch.no_grad():  # as in evaluation, where nothing is differentiated
        warploom.gemm(a, b, main_grad=INTO)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_second_derivative_is_refused_when_it_is_asked_for(activation: str | None) -> None:
    a, b = leaf(random(M, K)), leaf(random(K, N))
    d = warploom.gemm(a, b, activation=activation)
    (da,) = torch.autograd.grad(d.sum(), a, create_graph=True)
    with pytest.raises(ProblemError, match="second derivative of warploom"):
        da.sum().backward()
