"""Gradients are those of the same product with the weight given back; the weight has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixed_samples import E4M3, FP32, K, N, random, sample
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.quantization import PackedWeight
from warploom.runtime.families.mixed_gemm import layer

Leaves = dict[str, torch.Tensor]


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def leaves() -> Leaves:
    return {
        "a": leaf(random(2, 3, K)),
        "bias": leaf(random(N, seed=2)),
        "residual": leaf(random(2, 3, N, seed=3)),
        "scale_a": leaf(torch.rand(6) + 0.5),
    }


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"only": ("a",)},
    "bias": {"only": ("a", "bias")},
    "added": {"only": ("a", "bias", "residual"), "beta": 0.5},
    "activation": {"only": ("a", "bias", "residual"), "activation": "gelu"},
    "scaled": {"only": ("a", "bias", "scale_a"), "activation": "silu", "scale_d": 0.5},
}


def expected(given: Leaves, w: torch.Tensor, way: dict[str, Any]) -> torch.Tensor:
    """D in float64 by torch."""
    x = given["a"].double() @ w.double().t()
    if "scale_a" in given:
        x = x * given["scale_a"].double().reshape(2, 3, 1)
    if "bias" in given:
        x = x + given["bias"].double()
    if "activation" in way:
        x = getattr(F, way["activation"])(x)
    if "residual" in given:
        x = x + way.get("beta", 1.0) * given["residual"].double()
    return x * way.get("scale_d", 1.0)


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in WAYS), ("plain", True), ("scaled", True)]
)
def test_gradients_are_those_of_the_weight_given_back(name: str, compiled: bool) -> None:
    torch._dynamo.reset()
    way = dict(WAYS[name])
    given = {key: one for key, one in leaves().items() if key in way["only"]}
    del way["only"]
    weight, exact = sample()

    def run(weight: PackedWeight, a: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return warploom.mixed_gemm(a, weight, **keywords, **way)

    function = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    d = function(weight, **given)
    dd = random(2, 3, N, seed=4)
    d.backward(dd)
    found = {key: one.grad for key, one in given.items()}
    for one in given.values():
        one.grad = None
    expected(given, exact, way).backward(dd.double())
    for key, one in given.items():
        assert found[key] is not None and found[key].dtype == one.dtype
        torch.testing.assert_close(
            found[key], one.grad, rtol=3e-2, atol=3e-2 * float(one.grad.abs().max())
        )


@pytest.mark.parametrize("name", ["bias", "activation"])
def test_activation_checkpointing_gives_the_same_gradients(name: str) -> None:
    """It counts how often what was saved is read, and refuses a second time."""
    way = dict(WAYS[name])
    only = way.pop("only")
    found: list[list[torch.Tensor]] = []
    for recomputed in (False, True):
        read = [leaves()[one] for one in only]

        def call(*read: torch.Tensor) -> torch.Tensor:
            a, *others = read
            named = dict(zip(only[1:], others, strict=True))
            return warploom.mixed_gemm(a, sample().packed, **named, **way)

        d = checkpoint(call, *read, use_reentrant=False) if recomputed else call(*read)
        found.append([*torch.autograd.grad(d.float().square().sum(), read)])
    assert all(map(torch.equal, *found))


def test_only_what_is_wanted_is_kept() -> None:
    """Of a product without an activation no activations are kept: the weight is, which is there."""
    weight, _ = sample()
    kept: list[torch.Tensor] = []
    a = leaf(random(4, K))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda x: x):
        warploom.mixed_gemm(a, weight, bias=random(N))
    assert not any(one.data_ptr() == a.data_ptr() for one in kept)
    assert any(one.data_ptr() == weight.data.data_ptr() for one in kept)


def test_a_second_derivative_is_refused() -> None:
    weight, _ = sample()
    a = leaf(random(4, K))
    (first,) = torch.autograd.grad(warploom.mixed_gemm(a, weight).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


def test_what_a_step_writes_must_not_require_grad() -> None:
    weight, _ = sample()
    with pytest.raises(ProblemError, match="amax that requires grad"):
        warploom.mixed_gemm(random(4, K), weight, amax=torch.zeros(1, requires_grad=True))


def test_no_gradient_is_lost_of_a_call_that_writes_under_a_compiler() -> None:
    weight, _ = sample()

    def run(a: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        return warploom.mixed_gemm(a, weight, amax=amax)

    a, amax = leaf(random(4, K)), torch.zeros(1)
    run(a, amax).sum().backward()
    assert amax > 0 and a.grad is not None
    with pytest.raises(ProblemError, match="must be left out: operators"):
        torch.compile(run, backend="aot_eager")(a, amax)


def test_activations_of_8_bits_have_gradients_too() -> None:
    weight, exact = sample(activations="e4m3")
    a = random(4, K).to(E4M3).requires_grad_()
    warploom.mixed_gemm(a, weight, out_dtype=FP32).sum().backward()
    assert a.grad is not None and a.grad.dtype == E4M3
    torch.testing.assert_close(
        a.grad.float(), exact.sum(0).expand(4, K).float(), rtol=0.07, atol=0.1
    )


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_a_layer_differentiates_calls_alike_without_making_them(
    activation: str | None, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, _ = sample()
    calls, call = layer.Layer(), layer.Call(weight.metadata, activation, biased=biased)
    x, bias, dd = leaf(random(2, 3, K)), leaf(random(N, seed=2)), random(2, 3, N, seed=4)
    wanted = (x, bias) if biased else (x,)
    read = (x, *weight.tensors().values(), *wanted[1:])
    d = warploom.mixed_gemm(x, weight, bias=bias if biased else None, activation=activation)
    exact = d, *torch.autograd.grad(d, wanted, dd)

    def results(d: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        assert d is not None
        return d, *torch.autograd.grad(d, wanted, dd)

    assert all(map(torch.equal, results(calls.call(call, read)), exact))
    monkeypatch.setattr(layer, "planned", None)  # nothing is looked up
    assert all(map(torch.equal, results(calls.again(call, read)), exact))
    with torch.no_grad():
        assert calls.again(call, read) is None  # which is another kind of call


def test_a_layer_refuses_gradients_of_its_weight() -> None:
    weight, _ = sample(group=None)
    data, scales = weight.tensors().values()
    call, calls = layer.Call(weight.metadata, None, biased=False), layer.Layer()
    for _ in range(2):
        with pytest.raises(ProblemError, match="channel_scales that requires grad"):
            calls.call(call, (random(2, 3, K), data, leaf(scales)))
