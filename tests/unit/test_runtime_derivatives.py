"""No call, planned, compiled or eager, forward or reverse mode, drops a derivative in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.gemm import operators
from warploom.runtime.families.gemm.call import GemmCall

A = torch.randn(5, 16).bfloat16()
W = torch.randn(8, 16).bfloat16()
BIAS = torch.randn(8)
Q, K = torch.randn(1, 2, 6, 16).bfloat16(), torch.randn(1, 2, 6, 16).bfloat16()


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def out() -> torch.Tensor:
    return torch.empty(5, 8, dtype=torch.bfloat16)


def asking(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


WRITING: dict[str, tuple[Callable[[], Any], str]] = {
    "out": (lambda: warploom.gemm(asking(A), W.t(), out=out()), "has not seen before"),
    "out and b": (lambda: warploom.gemm(A, asking(W).t(), out=out()), "has not seen before"),
    "amax": (
        lambda: warploom.gemm(A, W.t(), amax=torch.zeros(1).requires_grad_()),
        "does not see",
    ),
}


@pytest.mark.parametrize(("backend", "fullgraph"), [("eager", True), ("aot_eager", True)])
def test_a_compiled_layer_trains_with_the_gradient_of_its_weight(
    backend: str, fullgraph: bool
) -> None:
    before, weight, after = (torch.nn.Linear(16, 16).bfloat16(), asking(W), torch.nn.Linear(8, 4))

    def layer(x: torch.Tensor) -> torch.Tensor:
        hidden = warploom.gemm(torch.relu(before(x)), weight.t(), activation="silu")
        return after(hidden.float()).sum()

    asked = (weight, *before.parameters(), *after.parameters())
    expected = torch.autograd.grad(layer(A), asked)
    compiled = torch.compile(layer, backend=backend, fullgraph=fullgraph)
    for one, other in zip(torch.autograd.grad(compiled(A), asked), expected, strict=True):
        assert torch.allclose(one, other, rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        assert torch.allclose(compiled(A), layer(A), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", WRITING)
def test_a_call_that_writes_what_autograd_would_differentiate_is_refused(case: str) -> None:
    function, match = WRITING[case]
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        with pytest.raises(ProblemError, match=match):
            call()


def test_the_operator_that_writes_refuses_too() -> None:
    rest = (["bias"], [BIAS], [], torch.bfloat16, "fast", None)
    with pytest.raises(ProblemError, match="has not seen before"):
        torch.ops.warploom.gemm_out(asking(A), W.t(), *rest, out=out())
    with pytest.raises(ProblemError, match="has not seen before"):
        operators.call(GemmCall(A, asking(W).t(), [], out(), None, True, None))


def test_a_plan_refuses_what_an_eager_call_refuses() -> None:
    plan = warploom.plan(A, W.t(), out=out())
    for operands in ((A, asking(W).t()), (asking(A), W.t())):
        with pytest.raises(ProblemError, match="has not seen before"):
            plan(*operands, out=out())
        with torch.no_grad():
            assert not plan(*operands, out=out()).requires_grad


DUAL: dict[str, Callable[[torch.Tensor], Any]] = {
    "gemm": lambda x: warploom.gemm(x(A), W.t()),
    "gemm bias": lambda x: warploom.gemm(A, W.t(), bias=x(BIAS)),
    "plan": lambda x: warploom.plan(A, W.t())(x(A), W.t()),
    "attention": lambda x: warploom.attention(Q, x(K), K),
    "plan_attention": lambda x: warploom.plan_attention(Q, K, K)(Q, K, x(K)),
}


@pytest.mark.parametrize("case", DUAL)
def test_a_tangent_is_not_dropped(case: str) -> None:
    def dual(tensor: torch.Tensor) -> torch.Tensor:
        return forward_ad.make_dual(tensor, torch.ones_like(tensor))

    with forward_ad.dual_level():
        DUAL[case](lambda tensor: tensor)  # without a tangent, nothing is dropped
        with pytest.raises(ProblemError, match=r"a dual tensor.*no forward-mode derivative"):
            DUAL[case](dual)


def test_the_tangent_of_an_incoming_gradient_is_not_dropped() -> None:
    q = asking(Q)
    result = warploom.attention(q, K, K)
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(torch.ones_like(result), torch.ones_like(result))
        with pytest.raises(
            ProblemError, match=r"the gradient of warploom\.attention has no forward"
        ):
            torch.autograd.grad((result * weight).sum(), q)
