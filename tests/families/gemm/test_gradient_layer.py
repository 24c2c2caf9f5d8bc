"""The plans of a layer's gradients: found once, launched on addresses of what lies alike."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gemm_gradients import BF16, FP16, LAYOUTS, K, M, N, check, leaf, random

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.gemm import gradient_layer
from warploom.runtime.families.gemm.api import gemm_of_weight
from warploom.runtime.families.gemm.plan import GemmPlan
from warploom.runtime.plan import forget


@dataclass
class Memory:
    """A launch that multiplies what lies at the addresses that it is given, as a kernel reads it.

    It counts its launches.
    """

    plan: GemmPlan
    counted: dict[str, int]

    def run(self, addresses: tuple[int, ...], scalars: object, check: Any, *given: Any) -> None:  # noqa: ANN401
        check(*given)
        checked = self.plan.details
        what, problem = checked.operation, checked.problem
        dtype = BF16 if what.a == "bf16" else FP16
        m, n, k = problem.m, problem.n, problem.k
        a = _at(addresses[0], (m, k), problem.pitch_a, dtype, turned=what.layout_a == "col")
        b = _at(addresses[1], (k, n), problem.pitch_b, dtype, turned=what.layout_b == "col")
        d = _at(addresses[2], (m, n), problem.pitch_d, dtype, turned=False)
        d.copy_(a.double() @ b.double())
        self.counted["launches"] += 1


def _at(
    address: int, shape: tuple[int, int], pitch: int, dtype: torch.dtype, *, turned: bool
) -> torch.Tensor:
    rows, columns = reversed(shape) if turned else shape
    count = (rows - 1) * pitch + columns
    memory = (ctypes.c_char * (2 * count)).from_address(address)
    found = torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (pitch, 1))
    return found.t() if turned else found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What gradients of layers did: `launches`, and the `plans` that they asked for."""
    counted = {"launches": 0, "plans": 0}
    plan_of: Callable[..., GemmPlan] = gradient_layer._plan

    def launched(*given: Any) -> GemmPlan:
        counted["plans"] += 1
        found = plan_of(*given)
        launch: Any = None if found.details.empty else Memory(found, counted)
        return replace(found, launch=launch)

    forget()  # and with the plans, the rules that keep those of gradients
    monkeypatch.setattr(gradient_layer, "_plan", launched)
    return counted


@pytest.fixture(autouse=True)
def _forgotten(counted: dict[str, int]) -> Any:  # noqa: ANN401
    yield
    forget()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", [at for at, of in LAYOUTS.items() if of()[1].dim() == 2])
def test_operands_are_multiplied_where_they_lie(
    layout: str, dtype: torch.dtype, counted: dict[str, int]
) -> None:
    """An address goes with the extents and the layout of another operand, or a gradient comes back
    in another order of strides than its operand's.
    """
    a, b = (leaf(operand.to(dtype)) for operand in LAYOUTS[layout]())
    for items in ([], [("bias", leaf(random(N, dtype=dtype)))], [("activation", "silu")]):
        check(a, b, items)
        check(a, b.detach(), items)
        check(a.detach(), b, items)


def _narrow(d: torch.Tensor) -> torch.Tensor:
    """A gradient whose rows lie further apart than they are long."""
    return random(*d.shape[:-1], 2 * N, seed=9).to(d.dtype)[..., :N]


def _shifted(d: torch.Tensor) -> torch.Tensor:
    """A gradient at an address that is no multiple of 16 bytes."""
    return random(d.numel() + 1, seed=9).to(d.dtype)[1:].view(d.shape)


@pytest.mark.parametrize("shape", [(M, K), (2, M, K), (2, 1, M, K)])
def test_a_plan_is_only_for_gradients_that_lie_alike(
    shape: tuple[int, ...], counted: dict[str, int]
) -> None:
    """The next backward pass runs the plan of the first on a gradient of other strides."""
    x, weight = leaf(random(*shape)), leaf(random(N, K))
    for dd_of in (_narrow, torch.ones_like, _shifted, lambda d: d.new_ones(()).expand(d.shape)):
        check(x, weight.t(), [], dd_of=dd_of)
    counted["plans"] = counted["launches"] = 0
    for dd_of in (torch.ones_like, _narrow, torch.ones_like):
        check(x, weight.t(), [], dd_of=dd_of)
    assert counted["plans"] == 0
    assert counted["launches"] == 6


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("bias", [None, (N,), (1, N)])
@pytest.mark.parametrize("x", [(M, K), (2, M, K), "column-major"])
@pytest.mark.parametrize("weight_is_contiguous", [True, False])
def test_a_weight_has_the_gradients_of_its_transpose(
    x: Any,  # noqa: ANN401
    bias: tuple[int, ...] | None,
    activation: str | None,
    preactivation: Any,  # noqa: ANN401
    weight_is_contiguous: bool,
) -> None:
    """It is transposed once too often on one of the ways, or its gradient lies otherwise."""
    rows = leaf(random(K, M).t() if x == "column-major" else random(*x))
    weight = leaf(random(N, K) if weight_is_contiguous else random(K, N).t())
    added = None if bias is None else leaf(random(*bias))
    keywords: dict[str, Any] = {"bias": added, "activation": activation}
    keywords["preactivation"] = preactivation
    for wanted in ([rows, weight], [weight], [rows, weight, added]):
        read = [one for one in wanted if one is not None]
        found, expected = (
            torch.autograd.grad(d, read, random(*d.shape, seed=9))
            for d in (
                gemm_of_weight(rows, weight, **keywords),
                warploom.gemm(rows, weight.t(), **keywords),
            )
        )
        for one, like in zip(found, expected, strict=True):
            assert torch.equal(one, like)
            assert one.stride() == like.stride()


def test_hooks_may_bring_back_what_was_saved_otherwise() -> None:
    """A plan reads what a hook returned as what was saved lay."""
    x, weight, dd = leaf(random(M, K)), leaf(random(N, K)), random(M, N, seed=9)
    expected = torch.autograd.grad(warploom.gemm(x, weight.t()), (x, weight), dd)

    def other(saved: torch.Tensor) -> torch.Tensor:
        return saved.t().contiguous().t() if saved.is_contiguous() else saved.contiguous()

    for unpack in (torch.clone, other, torch.clone):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), unpack):
            d = warploom.gemm(x, weight.t())
        found = torch.autograd.grad(d, (x, weight), dd)
        for one, like in zip(found, expected, strict=True):
            torch.testing.assert_close(one, like, rtol=0, atol=0)


def test_memory_that_was_freed_is_refused() -> None:
    """Addresses go to a launch, of which one is 0: FSDP frees parameters between their uses."""
    x, weight = leaf(random(M, K)), leaf(random(N, K))
    for _ in range(2):
        d = warploom.gemm(x, weight.t())
        torch.autograd.grad(d, (x, weight), torch.ones_like(d), retain_graph=True)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match="must lie in memory"):
        torch.autograd.grad(d, x, torch.ones_like(d))


def test_what_was_saved_and_changed_since_is_refused() -> None:
    """Gradients are computed of values that the forward pass did not see."""
    x, weight = leaf(random(M, K)), leaf(random(N, K))
    results = (warploom.gemm(x, weight.t()), gemm_of_weight(x, weight))
    with torch.no_grad():
        weight.mul_(2)
    for d in results:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(d, x, torch.ones_like(d))
