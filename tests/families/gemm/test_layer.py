"""What a layer keeps of its calls, and gradients by plans that are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_gradients import FP16, K, M, N, check, exact, held, leaf, random
from gemm_gradients import LAYOUTS as PRODUCTS
from launched_plans import launched_plans
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import warploom
from warploom.errors import ProblemError
from warploom.runtime.counters import counters
from warploom.runtime.families.gemm.layer import Layer
from warploom.runtime.plan import Plan, forget


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Plan[Any, Any]]:
    return launched_plans(monkeypatch)


class Called:
    """A layer's calls as a module makes them."""

    def __init__(self) -> None:
        self.layer = Layer()
        self.kept = 0  # calls that were like an earlier one

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        preactivation: Any = "save",  # noqa: ANN401
    ) -> torch.Tensor:
        given = (x, weight, bias, activation, preactivation)
        found = self.layer.again(*given)
        self.kept += found is not None
        return self.layer.call(*given) if found is None else found


LAYOUTS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "plain": lambda: (random(M, K), random(N, K)),
    "fp16": lambda: (random(M, K, dtype=FP16), random(N, K, dtype=FP16)),
    "rows further apart": lambda: (random(M, 40)[:, 8:24], random(N, 40)[:, 16:32]),
    "rows of one matrix": lambda: (random(2, 3, K), random(N, K)),
    "one row": lambda: (random(1, K), random(N, K)),
    "rows in two places": lambda: (random(4, 6, K)[:, 1:4], random(N, K)),
    "column-major": lambda: (random(K, M).t(), random(N, K)),
    "a column-major weight": lambda: (random(M, K), random(K, N).t()),
    "shifted": lambda: (random(M * K + 1)[1:].view(M, K), random(N, K)),
    "no multiple of 16 bytes": lambda: (random(M, K - 3), random(N, K - 3)),
}
EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": (N,)},
    "a bias of one row": {"bias": (1, N)},
    "relu": {"activation": "relu"},
    "bias, gelu": {"bias": (N,), "activation": "gelu"},
    "recomputed": {"bias": (N,), "activation": "silu", "preactivation": "recompute"},
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_is_that_of_a_product_with_the_transpose(layout: str, epilogue: str) -> None:
    """An address goes with another operand's extents, a weight is transposed once too often, or a
    gradient lies otherwise than its operand; the first time, or when all is kept.
    """
    x, weight = map(leaf, LAYOUTS[layout]())
    keywords = dict(EPILOGUES[epilogue])
    if "bias" in keywords:
        keywords["bias"] = leaf(random(*keywords["bias"], dtype=x.dtype))
    bias, called = keywords.get("bias"), Called()
    for wanted in ([x, weight], [weight], [x], [x, weight, bias], [bias]):
        read = [one for one in wanted if one is not None]
        for one in (x, weight, *([] if bias is None else [bias])):
            one.requires_grad_(any(one is other for other in read))
        if not read:
            continue
        expected = warploom.gemm(x, weight.t(), **keywords)
        dd = random(*expected.shape, seed=9).to(x.dtype)
        gradients = torch.autograd.grad(expected, read, dd)
        for call in (
            called,
            called,
            lambda x, weight, **given: warploom.gemm(x, weight.t(), **given),
        ):
            d = call(x, weight, **keywords)
            assert torch.equal(d, expected)
            for one, like in zip(torch.autograd.grad(d, read, dd), gradients, strict=True):
                assert torch.equal(one, like)
                assert one.stride() == like.stride()


@pytest.mark.parametrize("epilogue", ["plain", "bias", "bias, gelu"])
@pytest.mark.parametrize("layout", [at for at, of in PRODUCTS.items() if of()[1].dim() == 2])
def test_gradients_of_products_are_launched_where_operands_lie(layout: str, epilogue: str) -> None:
    """An address goes with the extents and the layout of another operand."""
    a, b = map(leaf, PRODUCTS[layout]())
    keywords = dict(EPILOGUES[epilogue])
    bias, function = keywords.get("bias"), keywords.get("activation")
    items: list[tuple[Any, ...]] = [("bias", leaf(random(*bias)))] if bias else []
    items += [("activation", function)] if function else []
    for given in ((a, b), (a, b), (a, b.detach()), (a.detach(), b)):
        check(*given, items)


def _narrow(d: torch.Tensor) -> torch.Tensor:
    """A gradient whose rows lie further apart than they are long."""
    return random(*d.shape[:-1], 2 * N, seed=9).to(d.dtype)[..., :N]


def _shifted(d: torch.Tensor) -> torch.Tensor:
    """A gradient at an address that is no multiple of 16 bytes."""
    return random(d.numel() + 1, seed=9).to(d.dtype)[1:].view(d.shape)


@pytest.mark.parametrize("shape", [(M, K), (2, M, K), (2, 1, M, K)])
def test_a_plan_is_only_for_gradients_that_lie_alike(
    shape: tuple[int, ...], launches: list[Plan[Any, Any]]
) -> None:
    """The next backward pass runs the plan of the first on a gradient of other strides."""
    x, weight, called = leaf(random(*shape)), leaf(random(N, K)), Called()

    def differentiate(dd_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        d = called(x, weight)
        dd = dd_of(d.detach())
        found = torch.autograd.grad(d, (x, weight), dd)
        for one, like in zip(found, exact(x, weight.t(), [], dd), strict=True):
            held(one, like if one is found[0] else like.t(), N, str(dd.stride()))

    ways = (_narrow, torch.ones_like, _shifted, lambda d: d.new_ones(()).expand(d.shape))
    for dd_of in ways:
        differentiate(dd_of)
    planned = counters.plans
    launches.clear()
    for dd_of in (torch.ones_like, _narrow, ways[-1], torch.ones_like):
        differentiate(dd_of)
    assert counters.plans == planned
    assert len(launches) == 4 * 3


def test_hooks_may_bring_back_what_was_saved_otherwise() -> None:
    """A plan reads what a hook returned as what was saved lay."""
    x, weight, dd = leaf(random(M, K)), leaf(random(N, K)), random(M, N, seed=9)
    called = Called()
    expected = torch.autograd.grad(called(x, weight), (x, weight), dd)

    def other(saved: torch.Tensor) -> torch.Tensor:
        return saved.t().contiguous().t() if saved.is_contiguous() else saved.contiguous()

    for unpack in (torch.clone, other, torch.clone):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), unpack):
            d = called(x, weight)
        found = torch.autograd.grad(d, (x, weight), dd)
        for one, like in zip(found, expected, strict=True):
            torch.testing.assert_close(one, like, rtol=0, atol=0)


def test_memory_that_was_freed_is_refused() -> None:
    """Addresses go to a launch, of which one is 0: FSDP frees parameters between their uses."""
    x, weight, called = leaf(random(M, K)), leaf(random(N, K)), Called()
    for _ in range(2):
        d = called(x, weight)
        torch.autograd.grad(d, (x, weight), torch.ones_like(d), retain_graph=True)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match="must have memory"):
        torch.autograd.grad(d, x, torch.ones_like(d))


def test_what_was_saved_and_changed_since_is_refused() -> None:
    """Gradients are computed of values that the forward pass did not see."""
    x, weight = leaf(random(M, K)), leaf(random(N, K))
    results = (warploom.gemm(x, weight.t()), Called()(x, weight))
    with torch.no_grad():
        weight.mul_(2)
    for d in results:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(d, x, torch.ones_like(d))


def test_a_second_derivative_is_refused_when_it_is_asked_for() -> None:
    """It is zero: the first was computed where autograd does not look."""
    x, weight, called = leaf(random(M, K)), leaf(random(N, K)), Called()
    for _ in range(2):
        (dx,) = torch.autograd.grad(called(x, weight).sum(), x, create_graph=True)
        with pytest.raises(ProblemError, match="differentiable once"):
            dx.sum().backward()


# ---- What is kept --------------------------------------------------------------------------------


def test_a_call_is_run_again_only_where_nothing_changed() -> None:
    """What was decided for another mode, type, option or class of tensor decides this call too."""
    x, weight, bias = random(M, K), leaf(random(N, K)), random(N)
    called = Called()
    called(x, weight, bias)
    others: dict[str, Callable[[], torch.Tensor | None]] = {
        "activation": lambda: called.layer.again(x, weight, bias, "relu", "save"),
        "preactivation": lambda: called.layer.again(x, weight, bias, None, "recompute"),
        "no bias": lambda: called.layer.again(x, weight, None, None, "save"),
        "type": lambda: called.layer.again(x.half(), weight, bias, None, "save"),
        "shape": lambda: called.layer.again(x[1:], weight, bias, None, "save"),
        "strides": lambda: called.layer.again(random(M, 2 * K)[:, :K], weight, bias, None, "save"),
        "x is differentiated": lambda: called.layer.again(leaf(x), weight, bias, None, "save"),
        "weight is not": lambda: called.layer.again(x, weight.detach(), bias, None, "save"),
        "class": lambda: called.layer.again(x.as_subclass(Other), weight, bias, None, "save"),
    }
    modes: dict[str, Any] = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.float16),
        "forward mode": forward_ad.dual_level(),
        "flops": FlopCounterMode(display=False),
        "fake": FakeTensorMode(),
    }
    for what, other in others.items():
        assert other() is None, what
    for what, mode in modes.items():
        with mode:
            assert called.layer.again(x, weight, bias, None, "save") is None, what
    seen: list[object] = []
    torch.func.vmap(
        lambda one: (one, seen.append(called.layer.again(x, weight, bias, None, "save")))[0]
    )(x)
    assert seen == [None]
    assert called.layer.again(x, weight, bias, None, "save") is not None


class Other(torch.Tensor):
    """A class of which nothing is known."""


def test_kinds_of_calls_are_kept_beside_each_other() -> None:
    """A checkpoint runs a layer without gradients and then with them, in every step."""
    x, weight, called = random(M, K), leaf(random(N, K)), Called()
    planned = 0
    for _ in range(3):
        with torch.no_grad():
            called(x, weight)
        assert called(x, weight).requires_grad
        called(x[:2], weight)
        planned = planned or counters.plans
    assert counters.plans == planned
    assert called.kept == 6


def test_what_may_have_changed_is_planned_anew(launches: list[Plan[Any, Any]]) -> None:
    """A layer runs the kernel that was chosen before a tuner found a better one."""
    x, weight, called = random(M, K), leaf(random(N, K)), Called()
    called(x, weight)
    forget()
    called(x, weight)
    assert called.kept == 0
    assert launches[0] is not launches[1]


def test_copies_of_a_layer_keep_nothing() -> None:
    """Plans and torch's guards cannot be copied, nor pickled, with a model."""
    x, weight, called = random(M, K), leaf(random(N, K)), Called()
    called(x, weight)
    assert copy.deepcopy(called.layer).again(x, weight, None, None, "save") is None
    assert called.layer.again(x, weight, None, None, "save") is not None
