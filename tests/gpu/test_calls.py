"""What a call refuses, or takes in another shape, where only a GPU shows that it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import warploom
from warploom.errors import ProblemError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]
M, N, K = 64, 96, 256


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """A [M, K], and B [K, N] as a weight [N, K] transposed."""
    return rand(M, K), rand(N, K, seed=1).t()


def alive() -> None:
    """The context still computes: nothing has read or written where it must not."""
    torch.cuda.synchronize()
    a, b = operands()
    assert torch.allclose(warploom.gemm(a, b).float(), a.float() @ b.float(), rtol=2e-2, atol=1e-1)
    torch.cuda.synchronize()


# ---- Derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_gemm_trains_with_the_gradient_of_its_weight(backend: str) -> None:
    a, b = operands()
    weight = b.t().clone().requires_grad_()
    compiled = torch.compile(
        lambda x: warploom.gemm(x, weight.t()), backend=backend, fullgraph=True
    )
    dd = torch.randn(M, N, device="cuda").bfloat16()
    (found,) = torch.autograd.grad(compiled(a), weight, dd)
    assert torch.equal(found, warploom.gemm(dd.t(), a))
    with torch.no_grad():
        assert torch.equal(compiled(a), warploom.gemm(a, b))
    alive()


def test_a_warm_plan_refuses_tensors_that_require_grad() -> None:
    a, b = operands()
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    plan, asking = warploom.plan(a, b, out=out), b.detach().requires_grad_()
    for _ in range(3):
        plan(a, b, out)
        with torch.no_grad():
            plan(a, asking, out)
        with pytest.raises(ProblemError, match="has not seen before"):
            plan(a, asking, out)
        with torch.inference_mode():
            plan(a, asking, out)
    assert torch.equal(out, warploom.gemm(a, b))


def test_a_warm_plan_does_not_drop_a_tangent() -> None:
    a, b = operands()
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    plan, q = warploom.plan(a, b, out=out), rand(1, 2, 64, 64)
    plan(a, b, out), plan(a, b, out), warploom.attention(q, q, q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, torch.ones_like(a))
        turned = forward_ad.make_dual(q, torch.ones_like(q))
        calls: list[Callable[[], Any]] = [
            lambda: plan(dual, b, out),
            lambda: warploom.gemm(dual, b),
            lambda: warploom.attention(turned, q, q),
        ]
        for call in calls:
            with pytest.raises(ProblemError, match="no forward-mode derivative"):
                call()
        plan(a, b, out)


# ---- Tensors without memory ----------------------------------------------------------------------


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a copy whose storage was freed: its address is small, and not 0."""
    view = torch.stack([tensor, tensor])[1]
    torch.cuda.synchronize()
    view.untyped_storage().resize_(0)
    return view


FREED: dict[str, Callable[[Any], Any]] = {
    "a": lambda x: warploom.gemm(x(rand(M, K)), operands()[1]),
    "a that is copied": lambda x: warploom.gemm(x(rand(M, K + 1))[:, :K], operands()[1]),
    "bias": lambda x: warploom.gemm(*operands(), bias=x(rand(N))),
    "residual": lambda x: warploom.gemm(*operands(), residual=x(rand(M, N))),
    "scale_a": lambda x: warploom.gemm(*operands(), scale_a=x(rand(M).float())),
    "out": lambda x: warploom.gemm(*operands(), out=x(rand(M, N))),
    "k": lambda x: warploom.attention(
        rand(1, 2, 64, 64), x(rand(1, 2, 64, 64)), rand(1, 2, 64, 64)
    ),
    "cu_seqlens": lambda x: warploom.attention(
        *[rand(64, 2, 64)] * 3,
        cu_seqlens_q=x(torch.tensor([0, 64], dtype=torch.int32, device="cuda")),
        cu_seqlens_k=torch.tensor([0, 64], dtype=torch.int32, device="cuda"),
        max_seqlen_q=64,
        max_seqlen_k=64,
    ),
}


@pytest.mark.parametrize("case", FREED)
def test_an_operand_whose_storage_was_freed_never_reaches_a_kernel(case: str) -> None:
    call = FREED[case]

    def at_first(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, tensor])[1]

    call(at_first)  # its plan is warm
    before = warploom.counters.launches
    if case == "a that is copied":  # a view of what was freed cannot be made afterwards
        room = torch.stack([rand(M, K + 1)] * 2)[1]
        view = room[:, :K]
        torch.cuda.synchronize()
        room.untyped_storage().resize_(0)
        refused: Callable[[], Any] = lambda: warploom.gemm(view, operands()[1])  # noqa: E731
    else:
        refused = lambda: call(freed)  # noqa: E731
    with pytest.raises(ProblemError, match="must have memory"):
        refused()
    assert warploom.counters.launches == before
    alive()


def test_fake_and_meta_tensors_beside_memory_are_refused() -> None:
    a, b = operands()
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    warploom.gemm(a, b, out=out)
    with pytest.raises(ProblemError, match="must all be fake tensors"):
        warploom.gemm(FakeTensorMode().from_tensor(a), b, out=out)
    with pytest.raises(ProblemError, match="must be on one device"):
        warploom.gemm(a.to("meta"), b, out=out)
    alive()


def test_a_wrapper_subclass_is_computed_from_what_it_wraps() -> None:
    a, b = operands()
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    expected = warploom.gemm(a, b, out=out).clone()
    out.zero_()
    warploom.gemm(TwoTensor(a, a.clone()), b, out=out)
    assert torch.equal(out, expected)
    assert torch.equal(warploom.gemm(TwoTensor(a, a.clone()), b).b, expected)
    alive()


def test_a_traced_call_launches_its_kernel() -> None:
    a, b = operands()
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    plan = warploom.plan(a, b, out=out)
    plan(a, b, out), plan(a, b, out)
    calls = (lambda x: warploom.gemm(x, b), lambda x: plan(x, b, out))
    for call in calls:
        traced = make_fx(call)(a)
        assert torch.equal(traced(2 * a), warploom.gemm(2 * a, b))
