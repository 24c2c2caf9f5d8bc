"""No call, planned, compiled or eager, forward or reverse mode, drops a derivative in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import warploom
from warploom import nn
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


EXPERT_ROWS = warploom.route(torch.tensor([[1], [0], [1]]), 2)
FP8 = torch.ones(128, 128).to(torch.float8_e4m3fn)
TRANSFORMED: dict[str, Callable[[torch.Tensor], Any]] = {
    "combine": lambda x: warploom.combine(x, EXPERT_ROWS[2]),
    "permute": lambda x: warploom.permute(x, EXPERT_ROWS[2]),
    "block_sparse_gemm": lambda x: warploom.block_sparse_gemm(
        x, x.t(), torch.ones(1, 1, dtype=torch.bool)
    ),
    "sparse_gemm": lambda x: warploom.sparse_gemm(
        x, warploom.sparsify(torch.ones(64, 128).bfloat16())
    ),
    "attention_8bit": lambda x: warploom.attention_8bit(*[x.view(1, 1, 3, 128)] * 3),
    "Float8Linear": nn.Float8Linear.from_tensors(FP8, torch.ones(1, 1)),
    "trains in fp8": nn.Linear(128, 128, recipe="rowwise", dtype=torch.bfloat16),
    "BitLinear": nn.BitLinear.from_linear(torch.nn.Linear(128, 16, bias=False).bfloat16()),
}


@pytest.mark.parametrize("case", TRANSFORMED)
def test_a_transform_of_torch_func_is_named(case: str) -> None:
    """Some said how an autograd.Function must be written, to those who had written none."""
    x = torch.ones(3, 128).bfloat16()
    with pytest.raises(ProblemError, match=rf"{case} inside of torch\.func's grad: must be called"):
        torch.func.grad(lambda x: TRANSFORMED[case](x).float().sum())(x)
