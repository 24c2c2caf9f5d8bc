"""Tensors that lie nowhere: operators take them, or they are refused; no plan ever reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import warploom
from warploom.errors import ProblemError

A, B = torch.randn(4, 16).bfloat16(), torch.randn(8, 16).bfloat16().t()
Q, K = torch.randn(1, 2, 5, 16).bfloat16(), torch.randn(1, 2, 5, 16).bfloat16()
EXPECTED = warploom.gemm(A, B)  # and its plan is warm

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor's copy after its storage was freed, as FSDP does between uses."""
    view = torch.stack([tensor, tensor])[1]  # whose address is then small, and not 0
    view.untyped_storage().resize_(0)
    return view


OPERANDS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "a": (lambda x: warploom.gemm(x, B), A),
    "b": (lambda x: warploom.gemm(A, x), B.contiguous()),
    "bias": (lambda x: warploom.gemm(A, B, bias=x), torch.randn(8)),
    "scale_a": (lambda x: warploom.gemm(A, B, scale_a=x), torch.rand(4)),
    "residual": (lambda x: warploom.gemm(A, B, residual=x), EXPECTED.clone()),
    "out": (lambda x: warploom.gemm(A, B, out=x), torch.empty_like(EXPECTED)),
    "q": (lambda x: warploom.attention(x, K, K), Q),
    "k": (lambda x: warploom.attention(Q, x, K), K),
    "out of attention": (lambda x: warploom.attention(Q, K, K, out=x), torch.empty_like(Q)),
}


@pytest.mark.parametrize("case", OPERANDS)
@pytest.mark.parametrize("warm", [False, True])
def test_a_tensor_whose_storage_was_freed_is_refused(case: str, warm: bool) -> None:
    call, tensor = OPERANDS[case]
    if warm:
        call(tensor)
    with pytest.raises(ProblemError, match=r"must have memory: its storage is empty.*FSDP"):
        call(freed(tensor))


@pytest.mark.parametrize("case", OPERANDS)
@pytest.mark.parametrize("warm", [False, True])
def test_a_meta_tensor_beside_others_is_on_another_device(case: str, warm: bool) -> None:
    call, tensor = OPERANDS[case]
    if warm:
        call(tensor)
    with pytest.raises(ProblemError, match="on meta"):
        call(tensor.to("meta"))


def test_meta_tensors_give_meta_tensors_and_make_no_plan() -> None:
    before = warploom.counters.plans
    a, b = A.to("meta"), B.to("meta")
    for given, shape in (
        ((a, b), (4, 8)),
        ((a[:0], b), (0, 8)),
        ((a.expand(3, 4, 16), b), (3, 4, 8)),
    ):
        d = warploom.gemm(*given, bias=torch.zeros(8, device="meta"))
        assert (d.device.type, d.shape, d.dtype) == ("meta", shape, torch.bfloat16)
    out = torch.empty(4, 8, device="meta", dtype=torch.float32)
    assert warploom.gemm(a, b, out=out) is out
    q = Q.to("meta").requires_grad_()
    o, lse = warploom.attention(q, q, q, return_lse=True)
    (o.sum() + lse.sum()).backward()
    assert o.is_meta
    assert q.grad is not None
    assert q.grad.shape == q.shape
    assert warploom.counters.plans == before


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_give_fake_tensors(inside: bool) -> None:
    mode = FakeTensorMode()
    a, b, q = mode.from_tensor(A), mode.from_tensor(B), mode.from_tensor(Q)
    with mode if inside else torch.no_grad():
        d, o = warploom.gemm(a, b, activation="relu"), warploom.attention(q, q, q)
    assert isinstance(d, FakeTensor)
    assert isinstance(o, FakeTensor)
    assert (d.shape, d.dtype, d.device) == (EXPECTED.shape, EXPECTED.dtype, EXPECTED.device)


def test_a_fake_tensor_beside_memory_is_refused() -> None:
    fake = FakeTensorMode().from_tensor(A)
    with pytest.raises(
        ProblemError, match="a together with tensors that have memory: must all be fake"
    ):
        warploom.gemm(fake, B, out=torch.empty_like(EXPECTED))


def test_a_wrapper_subclass_sees_the_operators() -> None:
    wrapped = TwoTensor(A, 2 * A)
    d = warploom.gemm(wrapped, B)
    assert torch.equal(d.a, EXPECTED)
    assert torch.equal(d.b, 2 * EXPECTED)
    room = torch.empty_like(EXPECTED)
    warploom.gemm(TwoTensor(A, A.clone()), B, out=room)
    assert torch.equal(room, EXPECTED)
    q = TwoTensor(Q, Q.clone())
    assert torch.equal(warploom.attention(q, K, K).a, warploom.attention(Q, K, K))


def test_a_subclass_with_memory_is_a_tensor_like_others() -> None:
    weight = torch.nn.Parameter(B, requires_grad=False)
    assert torch.equal(warploom.gemm(A, weight), EXPECTED)


def test_a_traced_call_has_its_product_in_the_trace() -> None:
    plan = warploom.plan(A, B)
    for call in (lambda x: warploom.gemm(x, B), lambda x: plan(x, B)):
        traced = make_fx(call)(A)
        assert "warploom.gemm" in traced.code
        assert torch.equal(traced(2 * A), warploom.gemm(2 * A, B))
    traced = make_fx(lambda q: warploom.plan_attention(Q, K, K)(q, K, K)[0])(Q)
    assert "warploom.attention" in traced.code


def test_a_plan_takes_no_tensor_without_memory() -> None:
    plan = warploom.plan(A, B)
    with pytest.raises(ProblemError, match=r"a plan runs no operators: call the function"):
        plan(A.to("meta"), B.to("meta"))
    with pytest.raises(ProblemError, match="must have memory"):
        warploom.plan(A.to("meta"), B.to("meta"))
    with pytest.raises(ProblemError, match="must have memory"):
        warploom.plan_attention(*[Q.to("meta")] * 3)


def test_a_plan_may_be_called_in_a_compiled_function() -> None:
    plan, attend = warploom.plan(A, B), warploom.plan_attention(Q, K, K)
    compiled = torch.compile(lambda x, q: (plan(x, B), attend(q, K, K)), backend="eager")
    d, (out, _) = compiled(2 * A, Q)
    assert torch.equal(d, 2 * EXPECTED)
    assert torch.equal(out, warploom.attention(Q, K, K))
    assert torch.equal(torch.compile(plan, backend="eager", fullgraph=True)(A, B), EXPECTED)
